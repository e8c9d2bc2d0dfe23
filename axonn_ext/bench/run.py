"""Runs one rank of a benchmark, from the rendezvous to its rows. A wrong result gets no time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

import axonn_ext
from axonn_ext.bench import launched
from axonn_ext.bench.block import block_case
from axonn_ext.bench.case import Case, Spec
from axonn_ext.bench.gemm import gemm_case
from axonn_ext.bench.linear import linear_case
from axonn_ext.bench.reference import Outputs, Verdict, judge
from axonn_ext.bench.results import Ratios, Row
from axonn_ext.calibrate.measure import (
    MIN_BATCH_SECONDS,
    ROUNDS,
    Ranks,
    Timing,
    measure,
    ranks_of,
    synchronize_with,
)
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.console import Bar, Console


@dataclass(frozen=True)
class Plan:
    """What to time, and how."""

    specs: tuple[Spec, ...]
    threads: int  # the threads of each rank; 0: its share of the cores
    rounds: int

    @property
    def device(self) -> str:
        """The type of device on which all specs run."""
        return self.specs[0].device

    @property
    def grids(self) -> tuple[GridShape, ...]:
        return tuple(dict.fromkeys(spec.grid for spec in self.specs))


def run_worker(
    plan: Plan, here: Process, *, on_case: Callable[[Sequence[Row]], None] = lambda rows: None
) -> list[Row]:
    """Times all specs of the plan, whose grids must have all ranks; rank 0 shows progress.

    All ranks must call this, and get the same rows. Rank 0 calls `on_case` with the rows of each
    spec as soon as they are known.
    Raises: UserError if another rank has found a mistake by the user.
    """
    from rich.progress import TimeRemainingColumn

    rows: list[Row] = []
    bar = Bar(
        Console(stderr=True), len(plan.specs) * plan.rounds, "rounds", TimeRemainingColumn(),
        shown=here.rank == 0 and sys.stderr.isatty(), auto_refresh=False,
    )  # fmt: skip
    with (
        launched.meeting(plan.specs[0].op, plan, here, plan.device, threads=plan.threads),
        closing(bar),
    ):
        ranks = ranks_of(plan.device)
        grids = {shape: Grid(**shape.as_dict()) for shape in plan.grids}
        for spec in plan.specs:
            bar.show(f"{spec.op}  {spec.grid.short()}  {','.join(map(str, spec.shape))}")
            case = build_case(spec, grids[spec.grid])
            found = run_case(case, ranks, rounds=plan.rounds, on_round=bar.advance)
            rows += found
            if here.rank == 0:
                bar.close()
                on_case(found)
    return rows


def build_case(spec: Spec, grid: Grid) -> Case:
    """Returns this rank's calls for the spec."""
    builders = {"linear": linear_case, "block": block_case}
    return builders.get(spec.op, gemm_case)(spec, grid)


# --- One case ------------------------------------------------------------------------------------


NUM_WARM_UP_CALLS = 3
FLOOR, COLLECTIVE, BASELINE = "floor", "collective", "sequential"


def warm_up(call: Callable[[], Outputs]) -> Outputs:
    """Returns the result of an algorithm after its one-time work is done.

    Ranks have then set up shared memory, buffers are allocated, and "auto" has chosen.
    """
    with axonn_ext.warm_up():
        for _ in range(NUM_WARM_UP_CALLS - 1):
            call()
    return call()


def run_case(
    case: Case,
    ranks: Ranks,
    *,
    rounds: int = ROUNDS,
    min_batch_seconds: float = MIN_BATCH_SECONDS,
    on_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Times the algorithms of a case whose results are correct.

    All ranks must call this; rows are the same on all of them. Results are checked before timing,
    and the last timed result is checked again; if it is wrong, the algorithm gets no time either.
    """

    def verdict_on(outputs: Outputs) -> Verdict:
        return judge(case.complete(outputs), case.expected, ranks)

    verdicts = {name: verdict_on(warm_up(call)) for name, call in case.algorithms.items()}
    right = [name for name, verdict in verdicts.items() if verdict.correct]
    calls: dict[str, Callable[[], object]] = {FLOOR: case.floor}
    if case.collective is not None:
        calls[COLLECTIVE] = case.collective
    for call in calls.values():
        call()
    timings = measure(
        calls | {_timed(name): case.algorithms[name] for name in right},
        ranks,
        rounds=rounds,
        min_batch_seconds=min_batch_seconds,
        synchronize=synchronize_with(case.spec.device),
        on_round=on_round,
    )
    for name in right:
        outputs = timings[_timed(name)].last
        assert isinstance(outputs, dict)
        verdicts[name] = max(verdicts[name], verdict_on(outputs), key=lambda v: v.severity)
    return _rows(case, verdicts, timings, rounds=rounds)


def _timed(algorithm: str) -> str:
    return f"algorithm {algorithm}"


def _rows(
    case: Case, verdicts: dict[str, Verdict], timings: dict[str, Timing[object]], *, rounds: int
) -> list[Row]:
    """Returns a row for each algorithm, in the order of the case."""
    right = {name: timings[_timed(name)] for name, verdict in verdicts.items() if verdict.correct}
    floor, collective, baseline = timings[FLOOR], timings.get(COLLECTIVE), right.get(BASELINE)
    rows = []
    for name, verdict in verdicts.items():
        timing = right.get(name)
        ratios = Ratios.of(
            _median(timing),
            sequential=_median(baseline),
            floor=floor.median_us,
            collective=_median(collective),
        )
        rows.append(
            Row(
                op=case.spec.op,
                grid=case.spec.grid.as_dict(),
                shape=case.spec.shape._asdict(),
                dtype=case.spec.dtype,
                options=dict(case.spec.options),
                algorithm=name,
                correct=verdict.correct,
                median_us=_median(timing),
                min_us=None if timing is None else timing.min_us,
                iqr_us=None if timing is None else timing.iqr_us,
                floor_us=floor.median_us,
                floor_iqr_us=floor.iqr_us,
                collective_us=_median(collective),
                collective_iqr_us=None if collective is None else collective.iqr_us,
                speedup=ratios.speedup,
                ratio_to_floor=ratios.ratio_to_floor,
                hidden_share=ratios.hidden_share,
                overlap_efficiency=ratios.overlap_efficiency,
                rel_error=verdict.error if math.isfinite(verdict.error) else None,
                error_limit=verdict.limit,
                worst_output=verdict.output,
                batches=rounds,
                calls_per_batch=None if timing is None else timing.calls_per_batch,
                threads=torch.get_num_threads(),
            )
        )
    return rows


def _median(timing: Timing[object] | None) -> float | None:
    return None if timing is None else timing.median_us
