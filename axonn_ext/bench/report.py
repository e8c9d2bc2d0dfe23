"""Prints rows on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import rich.console

from axonn_ext.bench.benchmark import number
from axonn_ext.bench.output import noisy, print_titled, style_of, threads
from axonn_ext.bench.results import Row
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.console import say

COLUMNS = (
    "", "median", "spread", "min", "x floor", "speedup", "hidden", "overlap", "error"
)  # fmt: skip
LEGEND = (
    "us of one call on the slowest rank, median of {batches} batches of at least 50 ms; spread: "
    "width of the middle half; hidden: share of what sequential adds to the floor that is gone. "
    "What the columns mean: docs/benchmarks.md."
)


def print_group(
    console: rich.console.Console, group: Sequence[Row], *, cores: int = 0, gpus: int = 0
) -> None:
    """Prints the table of an op, grid and shape, and notes about it.

    cores, gpus: how many the ranks had of the kind on which they ran; 0 for the other kind.
    """
    first = group[0]
    alone = (
        ("compute alone", first.floor_us, first.floor_iqr_us),
        ("collective alone", first.collective_us, first.collective_iqr_us),
    )
    lines: list[tuple[Sequence[str], str]] = [
        ((label, microseconds(median), microseconds(spread)), "cyan")
        for label, median, spread in alone
        if median is not None
    ]
    lines += [(_cells(row), style_of(correct=row.correct)) for row in group]
    notes = [_finding(group), *(_wrong(row) for row in group if not row.correct)]
    print_titled(
        console, title(first), COLUMNS, lines, [*notes, *_cautions(group, cores=cores, gpus=gpus)]
    )


def print_legend(console: rich.console.Console, rows: Sequence[Row]) -> None:
    """Prints what the columns of the tables mean."""
    batches = ", ".join(str(n) for n in sorted({row.batches for row in rows}))
    say(console, LEGEND.format(batches=batches), style="dim")


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows in groups of one op, grid and shape, which were measured together."""
    return [list(group) for _, group in itertools.groupby(rows, key=title)]


def title(row: Row) -> str:
    """Returns a title that says what the group of the row measured."""
    names, sizes = ",".join(row.shape), ",".join(str(size) for size in row.shape.values())
    options = "".join(f", {value}" for value in row.options.values())
    return f"{row.op}  {GridShape(**row.grid).short()}  {names} = {sizes}  {row.dtype}{options}"


def microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _cells(row: Row) -> tuple[str, ...]:
    error = "not a number" if row.rel_error is None else f"{row.rel_error:.1e}"
    if not row.correct:
        return (row.algorithm, "wrong result", *["-"] * 6, error)
    return (
        row.algorithm,
        microseconds(row.median_us),
        microseconds(row.iqr_us),
        microseconds(row.min_us),
        number(row.ratio_to_floor),
        number(row.speedup),
        _percent(row.hidden_share),
        _percent(row.overlap_efficiency),
        error,
    )


def _wrong(row: Row) -> str:
    found = "no number" if row.rel_error is None else f"{row.rel_error:.1e}"
    return (
        f"{row.algorithm} is wrong and gets no time: the relative error of {row.worst_output} is "
        f"{found}, rounding explains {row.error_limit:.1e}"
    )


def _cautions(group: Sequence[Row], *, cores: int, gpus: int) -> list[str]:
    """Returns reasons why the numbers may be less meaningful than they seem."""
    cautions = []
    first, ranks = group[0], GridShape(**group[0].grid).size
    if gpus and ranks > gpus:
        cautions.append(
            f"{ranks} ranks take turns on {gpus} GPU{'s' if gpus > 1 else ''} and talk through "
            "sockets, as hosts would: nothing here is a speed of NVLink, nor of free GPUs"
        )
    if cores and ranks * first.threads > cores:
        cautions.append(
            f"{ranks} ranks of {threads(first.threads)} share {cores} cores, in compute alone as "
            f"well: times are not those of {ranks * first.threads} free cores"
        )
    timed = {row.algorithm: (row.median_us, row.iqr_us or 0.0) for row in group if row.median_us}
    floor = (first.floor_us, first.floor_iqr_us)
    times = {"compute alone": floor, **timed}
    cautions += noisy((name, median, spread) for name, (median, spread) in times.items())
    baseline = timed.get("sequential")
    if baseline is not None and baseline[0] - floor[0] < max(baseline[1], floor[1]):
        cautions.append("sequential is within its spread of the floor: hidden shares mean nothing")
    return cautions


def _finding(group: Sequence[Row]) -> str:
    """Names the fastest algorithm with a right result in a sentence."""
    timed = {row.algorithm: row for row in group if row.median_us is not None}
    if not timed:
        return "no algorithm had a right result"
    best = min(timed.values(), key=lambda row: row.median_us or 0.0)
    text = f"fastest: {best.algorithm}, {number(best.ratio_to_floor)} x compute alone"
    if "sequential" not in timed:
        return text + "; without sequential there is no speedup and no hidden share"
    if best.algorithm != "sequential":
        text += f", {number(best.speedup)} x as fast as sequential"
        if best.hidden_share is not None:
            text += f", hiding {best.hidden_share:.0%} of what that adds to the floor"
    return text


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if abs(value) < 10 else f"{'<-' if value < 0 else '>'}999%"
