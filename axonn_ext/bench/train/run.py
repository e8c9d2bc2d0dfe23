"""The part of one process: builds systems, checks their losses, and measures time or memory."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_ext.bench.train.check import NUM_STEPS, Verdict, compare, first_steps
from axonn_ext.bench.train.plan import FP32, SINGLE, Plan, SystemSpec, Workload
from axonn_ext.bench.train.results import MemoryUse, Row
from axonn_ext.bench.train.systems import State, System, build_system, whole_initial_state
from axonn_ext.calibrate.measure import Ranks, Timing, measure

Build = Callable[[SystemSpec, Plan, State | None], System]
_KIB = 1024


def time_systems(
    plan: Plan, on_round: Callable[[], None] = lambda: None, *, build: Build = build_system
) -> list[Row]:
    """Returns a row for each system of the plan; all ranks must call this.

    Only systems that train like `single` are timed; every plan has `single`.
    """
    state = whole_initial_state(plan)
    systems = [build(spec, plan, state) for spec in plan.systems]
    del state
    verdicts = check_systems(systems, dtype=plan.workload.dtype)
    timings = time_steps(
        [s for s in systems if verdicts[s.name].problem is None], plan.rounds, on_round
    )
    return [
        _row(spec, plan, system, verdicts[spec.name], timings)
        for spec, system in zip(plan.systems, systems, strict=True)
    ]


def check_systems(systems: Sequence[System], *, dtype: str = FP32) -> dict[str, Verdict]:
    """Compares the first steps of each system with those of `single`; all ranks must call this."""
    traces = {system.name: first_steps(system) for system in systems}
    return {name: compare(trace, traces[SINGLE], dtype=dtype) for name, trace in traces.items()}


def time_steps(
    systems: Sequence[System], rounds: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, Timing[None]]:
    """Times a step of each system, in turns; all ranks must call this."""
    calls = {system.name: _call(system) for system in systems}
    return measure(calls, Ranks(), rounds=rounds, on_round=on_round)


def weigh_system(plan: Plan) -> MemoryUse:
    """Measures the peak memory of some steps of the plan's only system; all ranks must call this.

    It must run in new processes, since memory that another system has freed would be used again.
    """
    (spec,) = plan.systems
    _load_libraries(plan.workload)
    before = _status("VmRSS")
    system = build_system(spec, plan, None)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    call = _call(system)
    for _ in range(NUM_STEPS):
        call()
    own = torch.tensor([_status("VmHWM") - before, _status("RssShmem")])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    peak, shared = max((t.tolist() for t in everyone), key=lambda pair: pair[0])
    return MemoryUse(peak, shared)


def _call(system: System) -> Callable[[], None]:
    """Returns a step with the system's number of threads; an empty one if this rank has no part."""
    step, num_threads = system.step, system.num_threads

    def call() -> None:
        if step is None:
            return
        if num_threads == 1:
            step()
            return
        torch.set_num_threads(num_threads)
        step()
        torch.set_num_threads(1)

    return call


def _load_libraries(workload: Workload) -> None:
    """Uses what any training in torch loads and allocates once, so that no system is charged it."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(workload.model.hidden_size))


def _status(name: str) -> int:
    """Returns a number of /proc/self/status in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no line {name}: memory cannot be measured here")
    return int(match[1]) * _KIB


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(
    spec: SystemSpec,
    plan: Plan,
    system: System,
    verdict: Verdict,
    timings: dict[str, Timing[None]],
) -> Row:
    row = Row(
        system=spec.name,
        kind=spec.kind,
        grid=spec.grid.as_dict() if spec.grid else None,
        num_ranks=1 if spec.kind == SINGLE else plan.num_ranks,
        num_threads=system.num_threads,
        batch_size=plan.workload.batch_size,
        dtype=plan.workload.dtype,
        loss_error=_finite(verdict.loss_error),
        norm_error=_finite(verdict.norm_error),
        problem=verdict.problem,
    )
    timing = timings.get(spec.name)
    if timing is None:
        return row
    return dataclasses.replace(
        row,
        median_ms=timing.median_us / 1e3,
        min_ms=timing.min_us / 1e3,
        spread_ms=timing.iqr_us / 1e3,
        rounds=len(timing.samples_us),
        tokens_per_s=plan.workload.tokens_per_step / timing.median_us * 1e6,
        ratio_to_single=timings[SINGLE].median_us / timing.median_us,
    )
