"""Prints rows on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from axonn_ext.bench.output import NOISY, threads
from axonn_ext.bench.results import Row
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.console import print_table

_COLUMNS = (
    "", "median", "spread", "min", "x floor", "speedup", "hidden", "overlap", "error"
)  # fmt: skip
LEGEND = (
    "us of one call on the slowest rank, median of {batches} batches of at least 50 ms; spread: "
    "width of the middle half; hidden: share of what sequential adds to the floor that is gone. "
    "What the columns mean: docs/benchmarks.md."
)


def print_group(console: Console, group: Sequence[Row], *, cores: int = 0, gpus: int = 0) -> None:
    """Prints the table of an op, grid and shape, and notes about it.

    cores, gpus: how many the ranks had of the kind on which they ran; 0 for the other kind.
    """
    print_table(console, _table(group))
    console.print(Group(*_notes(group, cores=cores, gpus=gpus), Text("")))


def print_legend(console: Console, rows: Sequence[Row]) -> None:
    """Prints what the columns of the tables mean."""
    batches = ", ".join(str(n) for n in sorted({row.batches for row in rows}))
    console.print(LEGEND.format(batches=batches), style="dim", highlight=False, markup=False)


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


def _table(group: Sequence[Row]) -> Table:
    first = group[0]
    table = Table(title=title(first), title_justify="left", title_style="bold", box=None,
                  header_style="dim", pad_edge=False, padding=(0, 1))  # fmt: skip
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for label, median, spread in (
        ("compute alone", first.floor_us, first.floor_iqr_us),
        ("collective alone", first.collective_us, first.collective_iqr_us),
    ):
        if median is not None:
            table.add_row(label, microseconds(median), microseconds(spread), style="cyan")
    for row in group:
        table.add_row(*_cells(row), style="" if row.correct else "bold red")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    error = "not a number" if row.rel_error is None else f"{row.rel_error:.1e}"
    if not row.correct:
        return (row.algorithm, "wrong result", *["-"] * 6, error)
    return (
        row.algorithm,
        microseconds(row.median_us),
        microseconds(row.iqr_us),
        microseconds(row.min_us),
        _number(row.ratio_to_floor),
        _number(row.speedup),
        _percent(row.hidden_share),
        _percent(row.overlap_efficiency),
        error,
    )


def _notes(group: Sequence[Row], *, cores: int, gpus: int) -> list[Text]:
    """Returns notes on the table."""
    notes = [Text(_finding(group))]
    notes += [Text(_wrong(row), style="red") for row in group if not row.correct]
    notes += [Text(text, style="yellow") for text in _cautions(group, cores=cores, gpus=gpus)]
    return notes


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
    if any(spread > NOISY * median for median, spread in (floor, *timed.values())):
        cautions.append(
            f"noisy: a spread is above {NOISY:.0%} of its median; quieten the machine or raise "
            "--rounds before small differences are believed"
        )
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
    text = f"fastest: {best.algorithm}, {_number(best.ratio_to_floor)} x compute alone"
    if "sequential" not in timed:
        return text + "; without sequential there is no speedup and no hidden share"
    if best.algorithm != "sequential":
        text += f", {_number(best.speedup)} x as fast as sequential"
        if best.hidden_share is not None:
            text += f", hiding {best.hidden_share:.0%} of what that adds to the floor"
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if abs(value) < 10 else f"{'<-' if value < 0 else '>'}999%"
