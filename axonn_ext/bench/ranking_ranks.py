"""Times training steps on every grid, on all ranks and in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from torch import Tensor

from axonn_ext import models
from axonn_ext.bench.ranking_cases import Config, Launch, Times
from axonn_ext.bench.train.check import compare, first_steps
from axonn_ext.bench.train.plan import OURS, Plan, SystemSpec, Workload
from axonn_ext.bench.train.run import time_steps
from axonn_ext.bench.train.systems import Step, System, build_system, our_step
from axonn_ext.calibrate.measure import Ranks, Timing
from axonn_ext.overlap import Orchestrator
from axonn_ext.pipeline import MicroBatch, Pipeline
from axonn_ext.ranks.grid import Grid
from axonn_ext.terminal.errors import TrainingError


def time_configs(launch: Launch) -> list[Times]:
    """Times a step of each configuration. All ranks must call this, and get the same times.

    Raises TrainingError if a configuration does not train like the first one, since its time would
    then mean nothing.
    """
    with ExitStack() as opened:
        systems = [_build(launch, config, opened) for config in launch.configs]
        _check(systems)
        timings: Mapping[str, Timing[None]] = time_steps(systems, "cpu", launch.rounds)
    ordered = [timings[system.name] for system in systems]
    return [Times(1e-6 * t.min_us, 1e-6 * t.median_us, 1e-6 * t.iqr_us) for t in ordered]


def _build(launch: Launch, config: Config, opened: ExitStack) -> System:
    """Returns a system that trains on a grid. opened: closes its resources at the end."""
    workload, spec = (
        Workload(launch.case.model, launch.case.batch_size),
        SystemSpec(OURS, config.grid),
    )
    if config.grid.pipe > 1:
        system = System(spec.name, _step_of_stages(workload, config, opened))
    elif config.overlap is not None:
        system = System(spec.name, _step_with_overlap(workload, config, opened))
    else:
        plan = Plan(
            workload, config.parallel, systems=(), num_ranks=config.grid.size, single_threads=1,
            rounds=launch.rounds,
        )  # fmt: skip
        system = build_system(spec, plan, None)
    return dataclasses.replace(system, name=f"{system.name} {config.layout}")


def _step_with_overlap(workload: Workload, config: Config, opened: ExitStack) -> Callable[[], Step]:
    """Returns a training step on a grid without stages, with an Orchestrator."""
    grid = Grid(**config.grid.as_dict())
    model = models.build(workload.model, grid, config.parallel, seed=workload.seed)
    orchestrator = Orchestrator(model, config.overlap)
    opened.callback(orchestrator.close)

    def gradients(token_ids: Tensor, labels: Tensor) -> Tensor:
        loss = model.loss(token_ids, labels, float(workload.tokens_per_step))
        loss.backward()
        orchestrator.sync_gradients()
        return loss

    return our_step(model, grid, workload, gradients)


def _step_of_stages(workload: Workload, config: Config, opened: ExitStack) -> Callable[[], Step]:
    """Returns a training step on a grid with several stages."""
    grid = Grid(**config.grid.as_dict())
    model = models.build(workload.model, grid, config.parallel, seed=workload.seed)
    pipeline = opened.enter_context(Pipeline(model, grid, config.pipeline, overlap=config.overlap))

    def gradients(token_ids: Tensor, labels: Tensor) -> Tensor:
        parts = (t.chunk(config.micro_batches) for t in (token_ids, labels))
        micro_batches = [MicroBatch(*pair) for pair in zip(*parts, strict=True)]
        loss = pipeline.step(micro_batches, num_labels=float(workload.tokens_per_step))
        pipeline.sync_gradients()
        return loss

    return our_step(pipeline.module, grid, workload, gradients)


def _check(systems: list[System]) -> None:
    traces = {system.name: first_steps(system, Ranks(), 1) for system in systems}
    reference = traces[systems[0].name]
    for name, trace in traces.items():
        problem = compare(trace, reference).problem
        if problem is not None:
            raise TrainingError(f"{name} trains something else than {systems[0].name}: {problem}")
