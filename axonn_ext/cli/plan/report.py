"""Prints a plan: the table, and what was rejected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axonn_ext.cli.plan.budget import Budget
from axonn_ext.cli.plan.cells import (
    PEAK_TITLE,
    budget_cells,
    budget_heads,
    duration,
    exposed,
    gigabytes,
    gpus,
    micro_batches,
    options,
    peak,
    size,
)
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.fastest import Plan
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.uncertainty import RANGE, TIE, is_tie, published_range
from axonn_ext.terminal.console import new_table, print_table, say

NEARLY_FULL = 0.9  # of the memory
TIE_MARK = "="  # next to the number of a configuration


def print_plan(console: Console, result: Plan, budget: Budget, *, seconds: float) -> None:
    """Prints the request, the best configurations, and why others were rejected."""
    say(console, describe(result.request))
    say(
        console,
        f"{result.num_considered:,} configurations, of which {result.fits:,} are legal and fit; "
        f"planned in {seconds:.1f} s",
    )
    say(console, "")
    print_table(console, _table(result.configs))
    for line in ("", *_options(result.configs), "", *_of_best(result.configs[0], budget)):
        say(console, line)
    for line in (*memory_warning(result.configs), *batch_warning(result.request)):
        say(console, line, "yellow")
    say(console, "")
    say(console, uncertainty(result.configs[0]))
    if any(result.rejected.values()):
        say(console, "")
        say(console, "rejected:")
    for reason, count in result.rejected.items():
        say(console, f"{count:>9,}  {reason}")


def memory_warning(configs: Sequence[Estimate]) -> list[str]:
    """Returns a line that names the configurations with which memory is nearly full, if any."""
    full = [str(n) for n, e in enumerate(configs, start=1) if e.memory_share > NEARLY_FULL]
    if not full:
        return []
    return [
        "",
        f"warning: number {', '.join(full)}: more than {NEARLY_FULL:.0%} of a GPU's memory is "
        "in use, including communicators and the machine's reserve; fragmentation may exhaust it",
    ]


def batch_warning(request: Request) -> list[str]:
    """Returns a line that suggests another batch if few grids divide this one, else nothing.

    The sequences are split over data and z, whose product must divide both them and the GPUs.
    """
    batch, ranks = request.batch_size, request.num_ranks
    most = math.gcd(batch, ranks)
    if batch < ranks or most * 4 > ranks:
        return []
    better = max(1, round(batch / ranks)) * ranks
    return [
        "",
        f"warning: {batch:,} sequences can be split over at most {most:,} of {ranks:,} GPUs along "
        f"data and z; --global-batch {better} allows more grids, which may be much faster",
    ]


def describe(request: Request) -> str:
    """Describes model, GPUs and batch in one line."""
    model = request.model
    return (
        f"{request.model_name} ({size(model.num_parameters())} parameters) on "
        f"{gpus(request.num_ranks)} of {request.machine.name}; a step of {request.batch_size:,} x "
        f"{model.sequence_length:,} = {size(request.batch_size * model.sequence_length)} tokens, "
        f"{request.dtype}"
    )


def subject(request: Request, estimate: Estimate) -> str:
    """Returns the title of a picture of one configuration."""
    return (
        f"{request.model_name} on {gpus(request.num_ranks)} of {request.machine.name}: "
        f"{estimate.job.grid.short()}"
    )


def uncertainty(best: Estimate) -> str:
    """Says how far the prediction may be off, and what the mark of ties means."""
    low, high = published_range(best.step_time_s)
    return (
        f"{TIE_MARK} at most {TIE:.0%} slower than the best, which a simulation cannot tell apart. "
        f"8 in 10 published steps on GPUs took {RANGE[0]:.2f} to {RANGE[1]:.2f} times what was "
        f"predicted; for the best that is {duration(low)} to {duration(high)}"
    )


def _table(configs: Sequence[Estimate]) -> Table:
    heads = ("", "grid", "step", PEAK_TITLE, "tokens/s", "memory", "exposed")
    table = new_table(heads, ("grid", "exposed"))
    for number, e in enumerate(configs, start=1):
        table.add_row(
            f"{number} {TIE_MARK if number > 1 and is_tie(e, configs[0]) else ' '}",
            e.job.grid.short(), duration(e.step_time_s), peak(e), size(e.tokens_per_s),
            gigabytes(e.memory.total), exposed(e), style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def _options(configs: Sequence[Estimate]) -> list[str]:
    """Returns a line for each: its micro-batches and options."""
    return [
        f"{number:>2}    {micro_batches(e.job)} sequences, {options(e.job)}"
        for number, e in enumerate(configs, start=1)
    ]


def _of_best(best: Estimate, budget: Budget) -> list[str]:
    """Says what limits the best configuration, and what the whole training run takes with it."""
    takes = zip(budget_cells(budget, best), budget_heads(budget), strict=True)
    return [
        f"the best is limited by {best.binding}",
        f"{size(budget.tokens)} tokens take {', '.join(map(' '.join, takes))} on the best",
    ]


def print_written(console: Console, paths: Iterable[Path]) -> None:
    """Prints which files were written."""
    names = ", ".join(map(str, paths))
    if names:
        say(console, "")
        say(console, f"written: {names}")
