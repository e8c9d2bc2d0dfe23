"""Prints rows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_ext.bench.benchmark import number
from axonn_ext.bench.output import noisy, print_titled, style_of
from axonn_ext.bench.pipeline.results import STAGES, Row, lines_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.console import Console, say

_COLUMNS = (
    "", "s a step", "quartiles", "vs 1f1b", "vs ideal", "simulated", "formula", "in flight",
    "deferred", "held", "decisions", "us each",
)  # fmt: skip


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Prints a table for each delay, and what follows from it."""
    lines = lines_of(rows)
    for delay in dict.fromkeys(row.delay for row in rows):
        group = [row for row in rows if row.delay == delay]
        cells = [(_cells(row), style_of(correct=not row.problem)) for row in group]
        findings = [line.sentence() for line in lines if line.delay == delay]
        print_titled(console, title(group[0]), _COLUMNS, cells, [*cautions(group), *findings])
    say(
        console, f"stages {STAGES}. in flight, deferred, held: the most micro-batches on a "
        "stage. What the columns mean: docs/benchmarks.md.", style="dim",
    )  # fmt: skip


def title(row: Row) -> str:
    """Returns what the rows with the same delay measured."""
    forward, backward, weight = row.stage_ms
    late = f"messages late by {percent(row.delay)} of it in the mean" if row.delay else "no delays"
    return (
        f"{GridShape(**row.grid).short()}, {row.micro_batches} micro-batches, emulated stages: "
        f"sleeps of {forward:g} + {backward:g} + {weight:g} ms a micro-batch; {late}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def cautions(group: Sequence[Row]) -> list[str]:
    """Returns what is wrong, and why numbers may be less meaningful than they seem."""
    texts = [f"{row.case}: {row.problem}; it gets no time" for row in group if row.problem]
    if group[0].delay:  # random delays spread
        return texts
    return texts + noisy((r.case, r.median_s, (r.high_s or 0) - (r.low_s or 0)) for r in group)


def exit_status(rows: Sequence[Row]) -> int:
    """Returns 1 if a schedule has wrong gradients, else 0."""
    return 1 if any(row.problem for row in rows) else 0


def _cells(row: Row) -> tuple[str, ...]:
    if row.median_s is None or row.use is None:
        return (row.case, "wrong", *["-"] * (len(_COLUMNS) - 2))
    use = row.use
    decided = max(use.decisions)
    return (
        row.case,
        number(row.median_s, 3),
        f"{row.low_s:.3f} to {row.high_s:.3f}",
        number(row.ratio_to_1f1b, 3),
        number(row.ratio_to_ideal, 3),
        number(row.simulated_s, 3),
        number(row.formula_s, 3),
        str(max(use.in_flight)),
        "-" if use.deferred is None else str(max(use.deferred)),
        "-" if use.held is None else str(max(use.held)),
        str(decided) if decided else "-",
        number(use.decision_us, 0),
    )
