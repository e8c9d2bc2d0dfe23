"""Prints rows on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console

from axonn_ext.bench.output import noisy
from axonn_ext.bench.train.plan import OURS, SINGLE
from axonn_ext.bench.train.results import Row
from axonn_ext.terminal.console import plain_table, print_table, say

_MIB = 2**20
_SPEED = ("", "ranks", "batch", "tokens/s", "ms a step", "spread", "vs single")
_COLUMNS = {
    "cpu": (*_SPEED, "memory", "of it shared", "loss error"),
    "cuda": (*_SPEED, "TFLOP/s", "of peak", "memory", "loss error"),
}


def print_rows(console: Console, rows: Sequence[Row], *, cores: int) -> None:
    """Prints a table of all runs, and notes about it."""
    table = plain_table()
    for column in _COLUMNS[rows[0].device]:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    runs = runs_of(rows)
    for run in runs:
        for row in run:
            table.add_row(*_cells(row), style=_style(row))
        table.add_section()
    print_table(console, table)
    for line in [line for run in runs for line in findings(run, cores=cores)]:
        say(console, line)


def runs_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows in groups that were timed together; each begins with `single`."""
    numbers = itertools.accumulate(row.kind == SINGLE for row in rows)
    pairs = itertools.groupby(zip(numbers, rows, strict=True), key=lambda pair: pair[0])
    return [[row for _, row in run] for _, run in pairs]


def findings(run: Sequence[Row], *, cores: int) -> list[str]:
    """Returns what the numbers of one run show, and how far they can be trusted."""
    lines = [f"{row.system}: {row.problem}; it gets no time" for row in run if row.problem]
    num_ranks = max(row.num_ranks for row in run)
    speeds = {row.system: row.tokens_per_s for row in run if row.tokens_per_s is not None}
    ours = [row for row in run if row.kind == OURS and row.system in speeds]
    theirs = [r for r in run if r.kind not in (OURS, SINGLE) and r.system in speeds]
    if ours:
        best = max(ours, key=lambda row: speeds[row.system])
        text = f"{_ranks(num_ranks)}: {best.system} reaches {best.ratio_to_single:.2f} of single"
        if theirs:
            rival = max(theirs, key=lambda row: speeds[row.system])
            ratio = speeds[best.system] / speeds[rival.system]
            text += f", {ratio:.2f} x the fastest of torch's on as many ranks ({rival.system})"
        lines.append(text)
    if run[0].device == "cpu" and num_ranks > cores:
        lines.append(
            f"{num_ranks} ranks share {cores} cores, all of which single has, too: split without "
            "any cost, the same arithmetic would reach 1.00 of single"
        )
    return lines + noisy((row.system, row.median_ms, row.spread_ms) for row in run)


def exit_status(rows: Sequence[Row]) -> int:
    """Returns 1 if a system did not train like the others, else 0."""
    return 1 if any(row.problem for row in rows) else 0


def _cells(row: Row) -> tuple[str, ...]:
    speed = ("wrong", "-", "-", "-")
    if row.median_ms is not None:
        speed = (
            f"{row.tokens_per_s:,.0f}",
            _milliseconds(row.median_ms),
            _milliseconds(row.spread_ms or 0.0),
            f"{row.ratio_to_single:.2f}",
        )
    ranks = str(row.num_ranks) if row.num_threads == 1 else f"1 x {row.num_threads} threads"
    error = "not a number" if row.loss_error is None else f"{row.loss_error:.0e}"
    memory = row.memory
    peak = "-" if memory is None else f"{memory.peak_bytes / _MIB:,.0f} MiB"
    if row.device == "cuda":
        work = (
            "-" if row.tflops is None else f"{row.tflops:,.1f}",
            "-" if row.peak_fraction is None else f"{row.peak_fraction:.1%}",
        )
        return (row.system, ranks, str(row.batch_size), *speed, *work, peak, error)
    shared = "-" if memory is None else f"{memory.shared_bytes / _MIB:,.0f} MiB"
    return (row.system, ranks, str(row.batch_size), *speed, peak, shared, error)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _style(row: Row) -> str:
    if row.problem:
        return "bold red"
    return {OURS: "bold", SINGLE: "cyan"}.get(row.kind, "")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
