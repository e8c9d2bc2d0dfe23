"""The work of one process: builds the schedules, checks their gradients, times them in turns."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from axonn_ext.bench.launched import from_plain
from axonn_ext.bench.pipeline.plan import BASE, OURS, Plan
from axonn_ext.bench.pipeline.results import MOST_ERROR, Row, Span, Use, make_row
from axonn_ext.bench.pipeline.systems import (
    Delays,
    StepUse,
    System,
    build_ours,
    error_of,
    serial_gradients,
)
from axonn_ext.calibrate.measure import Ranks, garbage_collected_by_hand, span, turns
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import of_all_ranks


@dataclass
class _Timed:
    """The measurements of one schedule. By delay: seconds of each round, and the last use."""

    system: System
    error: float = 0.0
    problem: str | None = None
    samples: dict[float, list[float]] = field(default_factory=dict)
    uses: dict[float, StepUse] = field(default_factory=dict)


def time_cases(plan: Plan, on_round: Callable[[], None] = lambda: None) -> list[Row]:
    """Returns a row for each case and delay of the plan; all ranks must call this.

    Only rank 0's rows have timelines and what other ranks needed.
    """
    grid, ranks = Grid(**plan.grid.as_dict()), Ranks()
    delays = Delays(plan.micro_batches, plan.stages * max(c.chunks for c in plan.cases), plan.seed)
    systems = build_systems(plan, grid, delays)
    timed = {system.spec.name: _Timed(system) for system in systems}
    _check(timed, plan, grid, ranks)
    right = [name for name, each in timed.items() if each.problem is None]
    with garbage_collected_by_hand():
        for number in range(plan.rounds):
            for delay in plan.delays:
                for name in turns(right, number):
                    if delay in plan.timed(timed[name].system.spec):
                        delays.draw(delay * plan.micro_batch_s, number)
                        _time(timed[name], delay, ranks)
            gc.collect()
            on_round()
    rows = _rows(timed, plan, grid)
    for system in systems:
        system.close()
    return rows


def build_systems(plan: Plan, grid: Grid, delays: Delays) -> list[System]:
    """Returns the systems of all cases of the plan; torch's are loaded only on request."""
    systems = []
    for spec in plan.cases:
        if spec.system == OURS:
            systems.append(build_ours(spec, plan, grid, delays))
            continue
        # Imported here, since torch's pipelining takes a second to load.
        from axonn_ext.bench.pipeline.rivals import build_torch

        systems.append(build_torch(spec, plan, grid))
    return systems


def _check(timed: dict[str, _Timed], plan: Plan, grid: Grid, ranks: Ranks) -> None:
    """Runs a step of each schedule, and compares its gradients with those of one process."""
    want = serial_gradients(plan, grid)
    for each in timed.values():
        each.system.forget()
        each.system.step()
        own = error_of(each.system.gradients(), want)
        each.error = max(error for (error,) in ranks.exchange(own))
        if not each.error <= MOST_ERROR:
            each.problem = f"wrong gradients: error {each.error:.1e}, at most {MOST_ERROR:.0e}"


def _time(each: _Timed, delay: float, ranks: Ranks) -> None:
    """Runs one step, which all ranks begin together."""
    each.system.forget()
    ranks.meet()
    began = time.perf_counter()
    each.system.step()
    seconds = span(ranks, began, time.perf_counter())
    each.samples.setdefault(delay, []).append(seconds)
    each.uses[delay] = each.system.use()


def _rows(timed: dict[str, _Timed], plan: Plan, grid: Grid) -> list[Row]:
    base = timed[BASE].samples if BASE in timed else {}
    rows = []
    for delay in plan.delays:
        for each in timed.values():
            if delay not in plan.timed(each.system.spec):
                continue
            use, timeline = _gather(each, delay, plan, grid)
            rows.append(make_row(
                each.system.spec, plan, delay,
                error=each.error if each.error == each.error else None, problem=each.problem,
                samples=each.samples.get(delay, []), base=base.get(delay, []),
                use=use, timeline=timeline,
            ))  # fmt: skip
    return rows


def _gather(
    each: _Timed, delay: float, plan: Plan, grid: Grid
) -> tuple[Use | None, tuple[tuple[Span, ...], ...]]:
    """Returns what all stages needed in the last round with the delay, and their timeline."""
    if each.problem is not None:
        return None, ()
    own = dataclasses.asdict(each.uses[delay])
    leads = grid.model_group.rank == grid.axis("data").rank == 0
    everyone = of_all_ranks([grid.axis("pipe").rank, leads, own])
    leaders = {stage: use for stage, leads, use in everyone if leads}
    stages = [from_plain(StepUse, leaders[stage]) for stage in range(plan.stages)]
    return _use(stages), _timeline(stages)


def _use(stages: Sequence[StepUse]) -> Use:
    deferred = tuple(use.deferred for use in stages if use.deferred is not None)
    held = tuple(use.held for use in stages if use.held is not None)
    num_bytes = tuple(use.deferred_bytes for use in stages if use.deferred_bytes is not None)
    decisions = tuple(use.decisions for use in stages)
    seconds = sum(use.decision_s for use in stages)
    return Use(
        in_flight=tuple(use.in_flight for use in stages),
        deferred=deferred or None,
        held=held or None,
        deferred_bytes=num_bytes or None,
        decisions=decisions,
        decision_us=seconds / sum(decisions) * 1e6 if sum(decisions) else None,
    )


def _timeline(stages: Sequence[StepUse]) -> tuple[tuple[Span, ...], ...]:
    """Returns the tasks of each stage, in seconds since the first of them began."""
    if not all(use.tasks for use in stages):
        return ()
    start = min(use.tasks[0].began for use in stages)
    return tuple(
        tuple(
            Span(run.task.kind, run.task.chunk, run.task.micro_batch,
                 round(run.began - start, 5), round(run.ended - start, 5))
            for run in use.tasks
        )
        for use in stages
    )  # fmt: skip
