"""Shows rows: as a table on a terminal, and as a chart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from axonn_ext.bench.benchmark import number
from axonn_ext.bench.output import noisy
from axonn_ext.bench.train.plan import FIXED, OURS, SINGLE, WEAK, Row
from axonn_ext.terminal import charts
from axonn_ext.terminal.console import new_table, print_table, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_COLORS = {
    SINGLE: charts.FADED, "ddp": charts.GREEN, "fsdp2": charts.ORANGE, "tp": "#7c3aed",
    "tp-sp": "#c026d3", OURS: charts.BLUE,
}  # fmt: skip
_SPEED = ("", "ranks", "batch", "tokens/s", "ms a step", "spread", "vs single")
_COLUMNS = {
    "cpu": (*_SPEED, "memory", "of it shared", "loss error"),
    "cuda": (*_SPEED, "TFLOP/s", "of peak", "memory", "loss error"),
}


def print_rows(console: Console, rows: Sequence[Row], *, cores: int) -> None:
    """Prints a table of all runs, and notes about it."""
    table = new_table(_COLUMNS[rows[0].device], gap=4)
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
    """Returns the findings of one run, and how far they can be trusted."""
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
            f"{num_ranks} ranks share {cores} cores, and single has all of these as well: split at "
            "no cost, the same arithmetic would reach 1.00 of single"
        )
    return lines + noisy((row.system, row.median_ms, row.spread_ms) for row in run)


def _cells(row: Row) -> tuple[str, ...]:
    speed: tuple[str, ...] = ("wrong", "-", "-", "-")
    if row.median_ms is not None:
        speed = (
            f"{row.tokens_per_s:,.0f}",
            *(number(ms, 0 if ms >= 100 else 2) for ms in (row.median_ms, row.spread_ms or 0.0)),
            f"{row.ratio_to_single:.2f}",
        )
    ranks = str(row.num_ranks) if row.num_threads == 1 else f"1 x {row.num_threads} threads"
    error = "not a number" if row.loss_error is None else f"{row.loss_error:.0e}"
    memory = row.memory
    peak, shared = "-", "-"
    if memory is not None:
        peak, shared = (f"{n / _MIB:,.0f} MiB" for n in (memory.peak_bytes, memory.shared_bytes))
    share = "-" if row.peak_fraction is None else f"{row.peak_fraction:.1%}"
    work = (number(row.tflops, 1), share, peak) if row.device == "cuda" else (peak, shared)
    return (row.system, ranks, str(row.batch_size), *speed, *work, error)


def _style(row: Row) -> str:
    if row.problem:
        return "bold red"
    return {OURS: "bold", SINGLE: "cyan"}.get(row.kind, "")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# --- The chart -----------------------------------------------------------------------------------


def plot_rows(
    rows: Sequence[Row], subtitle: str, path: Path, *, scaling: str, cores: int
) -> None:  # fmt: skip
    """Draws tokens/s and memory of the systems, or tokens/s over the number of ranks.

    Systems that trained wrongly are left out.
    """
    timed = [row for row in rows if row.tokens_per_s is not None]
    weighed = [row for row in timed if row.memory is not None]
    columns = 2 if scaling == FIXED and weighed else 1
    kind = {FIXED: "Training", WEAK: "Weak scaling"}.get(scaling, "Strong scaling")
    ranks, batch = (max(getattr(r, name) for r in rows) for name in ("num_ranks", "batch_size"))
    title = f"{kind}, {_ranks(ranks)}, {batch} sequences"
    figure = charts.new_figure((9.6, 5.0), title, subtitle, left=0.09)
    places = figure.add_gridspec(
        1, columns, left=0.09, right=0.97, top=0.8, bottom=0.2 if columns == 2 else 0.12, wspace=0.3
    )
    speed = charts.styled(figure.add_subplot(places[0]), "tokens/s")
    if scaling == FIXED:
        _bars(speed, timed, [row.tokens_per_s or 0.0 for row in timed])
        if columns == 2:
            memory = charts.styled(figure.add_subplot(places[1]), "peak memory of a rank (MiB)")
            _bars(memory, weighed, [r.memory.peak_bytes / _MIB for r in weighed if r.memory])
    else:
        _lines(speed, timed, cores=cores)
    figure.savefig(path)


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float]) -> None:
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        charts.draw_bar(axes, i, value, f"{value:,.0f}", color=_COLORS[row.kind])
    names = [row.system.replace(" ", "\n") for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8, rotation=0 if len(rows) < 7 else 45)


def _lines(axes: Axes, rows: Sequence[Row], *, cores: int) -> None:
    """Draws a line for each baseline, and one through our fastest grids."""
    counts = sorted({row.num_ranks for row in rows if row.kind != SINGLE})
    for kind in dict.fromkeys(row.kind for row in rows if row.kind != SINGLE):
        best: dict[int, float] = {}
        for row in rows:
            if row.kind == kind and row.tokens_per_s is not None:
                best[row.num_ranks] = max(best.get(row.num_ranks, 0.0), row.tokens_per_s)
        points = sorted(best.items())
        axes.plot([n for n, _ in points], [v for _, v in points], marker="o", color=_COLORS[kind],
                  linewidth=2.4 if kind == OURS else 1.4, label=kind)  # fmt: skip
        if kind == OURS:
            first, speed = points[0]
            ideal = [speed * min(n, cores) / min(first, cores) for n in counts]
            label = f"ideal: ours on {first}, up to {cores} cores"
            axes.plot(counts, ideal, "--", color=charts.INK, linewidth=1, label=label)
    axes.set_xticks(counts)
    axes.set_xlabel("ranks", color=charts.INK)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=charts.INK, fontsize=9)
