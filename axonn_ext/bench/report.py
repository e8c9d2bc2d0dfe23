"""Shows rows: as tables on a terminal, and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console

from axonn_ext.bench import symm_mem
from axonn_ext.bench.benchmark import number
from axonn_ext.bench.output import noisy, print_titled, style_of, threads
from axonn_ext.bench.results import Row, grouped, title
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal import charts
from axonn_ext.terminal.console import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COLUMNS = (
    "", "median", "spread", "min", "x floor", "speedup", "hidden", "overlap", "error"
)  # fmt: skip
LEGEND = (
    "us of one call on the slowest rank, median of {batches} batches of at least 50 ms; spread: "
    "width of the middle half; hidden: saved share of sequential's time above the floor. "
    "What the columns mean: docs/benchmarks.md."
)


def print_group(
    console: rich.console.Console, group: Sequence[Row], *, cores: int = 0, gpus: int = 0
) -> None:
    """Prints the table of an op, grid and shape, and notes about it.

    cores, gpus: how many the ranks had of the hardware they ran on; 0 for the other kind.
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
    """Returns reasons to mistrust the numbers."""
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
    """Returns a sentence that names the fastest algorithm with a correct result."""
    timed = {row.algorithm: row for row in group if row.median_us is not None}
    if not timed:
        return "no algorithm had a correct result"
    best = min(timed.values(), key=lambda row: row.median_us or 0.0)
    text = f"fastest: {best.algorithm}, {number(best.ratio_to_floor)} x compute alone"
    if "sequential" not in timed:
        return text + "; without sequential there is no speedup and no hidden share"
    if best.algorithm != "sequential":
        text += f", {number(best.speedup)} x as fast as sequential"
        if best.hidden_share is not None:
            text += f", hiding {best.hidden_share:.0%} of its time above the floor"
    return text


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if abs(value) < 10 else f"{'<-' if value < 0 else '>'}999%"


# --- The chart -----------------------------------------------------------------------------------


_COLORS = {
    "sequential": charts.GREY, "chunked": charts.ORANGE, "fused": charts.BLUE,
    "auto": charts.GREEN, symm_mem.NAME: "#9333ea",
}  # fmt: skip
_BAR_INCHES = 0.42
_HEAD_INCHES, _PANEL_INCHES = 1.09, 4.11
_MAX_GROUPS = 14  # groups side by side; more groups go into panels below


def plot_rows(rows: Sequence[Row], subtitle: str, path: Path) -> None:
    """Draws bars of time over that of compute alone, in groups of op, grid and shape.

    A bar is labelled with its time, and its whisker is the interquartile range of the batches. A
    wrong result has no bar. The suffix of the file's name decides the format.
    """
    groups = grouped(rows)
    panels = [groups[i : i + _MAX_GROUPS] for i in range(0, len(groups), _MAX_GROUPS)]
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    pitch = len(algorithms) + 1
    width = max(7.2, 1.6 + _BAR_INCHES * pitch * len(panels[0]))
    height = _HEAD_INCHES + _PANEL_INCHES * len(panels)
    left, right = 0.85 / width, 1 - 0.25 / width
    figure = charts.new_figure((width, height), _title(rows), subtitle, left=left)
    several = len({row.op for row in rows}) > 1
    for place, panel in enumerate(panels):
        bottom = (_PANEL_INCHES * (len(panels) - 1 - place) + 0.83) / height
        axes = figure.add_axes((left, bottom, right - left, 3.28 / height))
        axes.set_xlim(-1, len(panels[0]) * pitch - 1)  # bars have the same width in all panels
        floor = _draw_panel(axes, panel, algorithms, names_op=several)
        axes.set_xlabel(f"grid; {', '.join(rows[0].shape)}", color=charts.INK, fontsize=9)
    handles = [*charts.patches({name: _COLORS[name] for name in algorithms}), floor]
    charts.add_legend(figure, handles, left=left, inches=0.65)
    figure.savefig(path)


def _draw_panel(
    axes: Axes, groups: Sequence[Sequence[Row]], algorithms: Sequence[str], *, names_op: bool
) -> Line2D:
    """Draws a row of groups of bars; returns the line of the floor, for the legend."""
    pitch = len(algorithms) + 1
    tops = [1.0]
    for place, group in enumerate(groups):
        for row in group:
            tops.append(_draw_bar(axes, row, place * pitch + algorithms.index(row.algorithm)))
    axes.set_ylim(0, 1.25 * max(tops))  # leaves room for the labels of the bars
    middle = (len(algorithms) - 1) / 2
    labels = _labels(groups, names_op=names_op)
    charts.styled(axes, "time / compute alone").set_xticks(
        [i * pitch + middle for i in range(len(groups))], labels, fontsize=8
    )
    return axes.axhline(1.0, color=charts.RED, linewidth=1.4, linestyle="--", label="compute alone")


def _draw_bar(axes: Axes, row: Row, x: float) -> float:
    """Draws one algorithm's bar with its time, or a note instead; returns its height."""
    text, height, reach = "wrong result", 0.0, 0.0
    if row.median_us is not None and row.iqr_us is not None and row.ratio_to_floor is not None:
        text, height = _time(row.median_us), row.ratio_to_floor
        reach = row.iqr_us / row.floor_us / 2
    color = _COLORS[row.algorithm]
    charts.draw_bar(axes, x, height, text, color=color, reach=reach, upright=True)
    return height + reach


def _title(rows: Sequence[Row]) -> str:
    names = ", ".join(dict.fromkeys(row.op for row in rows))
    options = dict.fromkeys(", ".join((row.dtype, *row.options.values())) for row in rows)
    return f"{names}, {'; '.join(options)}"


def _labels(groups: Sequence[Sequence[Row]], *, names_op: bool) -> list[str]:
    return [
        (f"{group[0].op} " if names_op else "")
        + f"{GridShape(**group[0].grid).short()}\n"
        + ", ".join(map(str, group[0].shape.values()))
        for group in groups
    ]


def _time(us: float) -> str:
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e-3, "ms")):
        if us < limit:
            return f"{us * scale:.3g} {unit}"
    return f"{us * 1e-6:.3g} s"
