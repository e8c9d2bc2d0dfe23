"""Prints rows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_ext.bench.loss.results import LossRow
from axonn_ext.bench.output import NOISY, noisy, print_titled, threads
from axonn_ext.terminal.console import Console

_COLUMNS = ("", "ms", "spread", "min", "x floor", "vs torch", "peak MB", "x logits", "error")
LEGEND = (
    "ms: forward and backward, median; spread: width of the middle half; floor: two readings and "
    "one writing of the logits at the speed of a copy; peak: the most bytes at once beside the "
    "logits. What the columns mean: docs/benchmarks.md."
)


def print_rows(console: Console, rows: Sequence[LossRow]) -> None:
    """Prints a table for the rows of one vocabulary, and notes about it."""
    cells = [(_cells(row), row.correct) for row in rows]
    print_titled(console, title(rows[0]), _COLUMNS, cells, cautions(rows))


def title(row: LossRow) -> str:
    where = row.device if row.device == "cuda" else threads(row.threads)
    return f"loss  rows, vocabulary = {row.rows}, {row.vocab}  {row.dtype}, {where}"


def cautions(rows: Sequence[LossRow]) -> list[str]:
    """Returns what is wrong, and why numbers may be less meaningful than they seem."""
    texts = [
        f"{row.system} is wrong and gets no time: its relative error is {_error(row)}, rounding "
        f"explains {row.error_limit:.1e}"
        for row in rows
        if not row.correct
    ]
    spread = [row.system for row in rows if row.median_us and row.iqr_us
              and row.iqr_us > NOISY * row.median_us]  # fmt: skip
    return texts + noisy(spread)


def _cells(row: LossRow) -> tuple[str, ...]:
    memory = f"{row.peak_bytes / 1e6:,.1f}", f"{row.peak_over_logits:.2f}"
    if row.median_us is None or row.iqr_us is None or row.min_us is None:
        return (row.system, "wrong result", *["-"] * 4, *memory, _error(row))
    return (
        row.system,
        *(f"{us / 1e3:,.1f}" for us in (row.median_us, row.iqr_us, row.min_us)),
        *("-" if value is None else f"{value:.2f}" for value in (row.ratio_to_floor, row.speedup)),
        *memory,
        _error(row),
    )


def _error(row: LossRow) -> str:
    return "no number" if row.rel_error is None else f"{row.rel_error:.1e}"
