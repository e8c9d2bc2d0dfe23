"""Runs one rank of a benchmark, from the rendezvous to its rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from axonn_ext.bench.block import block_case
from axonn_ext.bench.case import Case, Spec
from axonn_ext.bench.gemm import gemm_case
from axonn_ext.bench.linear import linear_case
from axonn_ext.bench.results import Row
from axonn_ext.bench.run import run_case
from axonn_ext.calibrate.measure import ranks_of
from axonn_ext.grid import Grid
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.spec.grid import GridShape

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What is timed, and how."""

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

    All ranks must call this, and get the same rows. Rank 0 calls `on_case` with those of each spec
    as soon as they are known.
    Raises: UserError if another rank has found a mistake of the user.
    """
    store = process.open_store(here)
    process.meet(store, here, lambda: process.plan_values("bench", plan))
    process.set_threads(here, plan.threads)
    rows: list[Row] = []
    with process.process_group(here, store, plan.device), _progress(plan, here) as progress:
        ranks = ranks_of(plan.device)
        grids = {shape: Grid(**shape.as_dict()) for shape in plan.grids}
        for spec in plan.specs:
            progress.begin(spec)
            case = build_case(spec, grids[spec.grid])
            found = run_case(case, ranks, rounds=plan.rounds, on_round=progress.advance)
            rows += found
            if here.rank == 0:
                progress.hide()
                on_case(found)
    return rows


def build_case(spec: Spec, grid: Grid) -> Case:
    """Returns this rank's calls for the spec."""
    builders = {"linear": linear_case, "block": block_case}
    return builders.get(spec.op, gemm_case)(spec, grid)


class _Bar:
    """A progress bar of the rounds on a terminal; elsewhere it shows nothing."""

    def __init__(self, progress: Progress | None, num_rounds: int) -> None:
        self._progress = progress
        if progress is not None:
            self._task = progress.add_task("", total=num_rounds)

    def begin(self, spec: Spec) -> None:
        if self._progress is not None:
            self._progress.start()
            text = f"{spec.op}  {spec.grid.short()}  {','.join(map(str, spec.shape))}"
            self._progress.update(self._task, description=text, refresh=True)

    def hide(self) -> None:
        """Removes the bar until the next spec begins."""
        if self._progress is not None:
            self._progress.stop()

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, refresh=True)


@contextmanager
def _progress(plan: Plan, here: Process) -> Iterator[_Bar]:
    num_rounds = len(plan.specs) * plan.rounds
    if here.rank != 0 or not sys.stderr.isatty():
        yield _Bar(None, num_rounds)
        return
    # Imported here, since a program that shows nothing does not need rich.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from axonn_ext.terminal.console import Console

    console = Console(stderr=True)  # only the results go to standard output
    # The bar is drawn when a round ends. A thread that draws it would disturb the timing.
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        yield _Bar(progress, num_rounds)
