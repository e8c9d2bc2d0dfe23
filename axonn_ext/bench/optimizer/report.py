"""Prints rows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_ext.bench.optimizer.results import OptimizerRow
from axonn_ext.bench.output import NOISY, noisy, print_titled, threads
from axonn_ext.terminal.console import Console

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
    cells = [(_cells(row), row.correct) for row in rows]
    print_titled(console, title(rows[0]), _COLUMNS, cells, cautions(rows))


def title(row: OptimizerRow) -> str:
    where = row.device if row.device == "cuda" else threads(row.threads)
    return f"optimizer  {row.elements:,} elements  {row.dtype}, {where}"


def cautions(rows: Sequence[OptimizerRow]) -> list[str]:
    """Returns what is wrong, and why numbers may be less meaningful than they seem."""
    texts = [
        f"{row.system} is wrong and gets no time: after a few steps its weights are not finite, or "
        "have other bits than torch's"
        for row in rows
        if not row.correct
    ]
    spread = [row.system for row in rows if row.median_us and row.iqr_us
              and row.iqr_us > NOISY * row.median_us]  # fmt: skip
    return texts + noisy(spread)


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
