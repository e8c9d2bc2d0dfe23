"""Times training steps on every grid, on all ranks and in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from axonn_ext.bench.ranking.cases import Config, Launch
from axonn_ext.bench.ranking.compare import Times
from axonn_ext.bench.train.check import compare, first_steps
from axonn_ext.bench.train.plan import OURS, Plan, SystemSpec, Workload
from axonn_ext.bench.train.run import time_steps
from axonn_ext.bench.train.systems import System, build_system
from axonn_ext.calibrate.measure import Timing
from axonn_ext.terminal.errors import TrainingError


def time_configs(launch: Launch) -> list[Times]:
    """Times a step of each configuration. All ranks must call this, and get the same times.

    Raises TrainingError if a configuration does not train like the first one, since its time would
    then mean nothing.
    """
    systems = [_build(launch, config) for config in launch.configs]
    _check(systems)
    timings: Mapping[str, Timing[None]] = time_steps(systems, launch.rounds)
    ordered = [timings[system.name] for system in systems]
    return [Times(1e-6 * t.min_us, 1e-6 * t.median_us, 1e-6 * t.iqr_us) for t in ordered]


def _build(launch: Launch, config: Config) -> System:
    plan = Plan(
        Workload(launch.case.model, launch.case.batch_size), config.parallel, systems=(),
        num_ranks=config.grid.size, single_threads=1, rounds=launch.rounds,
    )  # fmt: skip
    system = build_system(SystemSpec(OURS, config.grid), plan, None)
    return dataclasses.replace(system, name=f"{system.name} {config.layout}")


def _check(systems: list[System]) -> None:
    traces = {system.name: first_steps(system, 1) for system in systems}
    reference = traces[systems[0].name]
    for name, trace in traces.items():
        problem = compare(trace, reference).problem
        if problem is not None:
            raise TrainingError(f"{name} trains something else than {systems[0].name}: {problem}")
