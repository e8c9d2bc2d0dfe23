"""Prints rows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from axonn_ext.bench.optimizer.results import OptimizerRow
from axonn_ext.terminal.console import plain_table, print_table, say

NOISY = 0.1  # if the middle half exceeds this share of the median, small differences mean nothing
_COLUMNS = (
    "", "ms", "spread", "min", "G el/s", "vs torch", "x floor", "device MB", "host MB", "disk MB"
)  # fmt: skip
LEGEND = (
    "ms: a step, median; spread: width of the middle half; G el/s: 10^9 elements a second; vs "
    "torch: speed relative to torch's fused AdamW in fp32; floor: the bytes that must be read and "
    "written, at the speed of a pass in place; MB: weights, gradients, masters and moments. What "
    "the columns mean: docs/benchmarks.md."
)


def print_rows(console: Console, rows: Sequence[OptimizerRow]) -> None:
    """Prints a table of the rows, and notes about it."""
    say(console, title(rows[0]), style="bold")
    table = plain_table()
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row), style="" if row.correct else "bold red")
    print_table(console, table)
    for text in cautions(rows):
        say(console, text)
    say(console, "")


def title(row: OptimizerRow) -> str:
    where = row.device if row.device == "cuda" else threads_of(row)
    return f"optimizer  {row.elements:,} elements  {row.dtype}, {where}"


def threads_of(row: OptimizerRow) -> str:
    return f"{row.threads} thread{'s' if row.threads > 1 else ''}"


def cautions(rows: Sequence[OptimizerRow]) -> list[str]:
    """Returns what is wrong, and why numbers may be less meaningful than they seem."""
    texts = [
        f"{row.system} is wrong and gets no time: after a few steps its weights are not finite, or "
        "have other bits than torch's"
        for row in rows
        if not row.correct
    ]
    noisy = [row.system for row in rows if row.median_us and row.iqr_us
             and row.iqr_us > NOISY * row.median_us]  # fmt: skip
    if noisy:
        texts.append(
            f"noisy ({', '.join(noisy)}): a spread is above {NOISY:.0%} of its median; quieten the "
            "machine or raise --rounds before small differences are believed"
        )
    return texts


def _cells(row: OptimizerRow) -> tuple[str, ...]:
    held = [f"{n / 1e6:,.1f}" for n in (row.device_bytes, row.host_bytes, row.disk_bytes)]
    if row.median_us is None or row.iqr_us is None or row.min_us is None:
        return (row.system, "wrong bits", *["-"] * 5, *held)
    ratios = (row.elements_per_ns, row.vs_torch, row.ratio_to_floor)
    return (
        row.system,
        *(f"{us / 1e3:,.2f}" for us in (row.median_us, row.iqr_us, row.min_us)),
        *("-" if value is None else f"{value:.2f}" for value in ratios),
        *held,
    )
