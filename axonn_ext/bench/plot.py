"""Draws a bar chart of rows, as multiples of the time of computation alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.bench import charts, symm_mem
from axonn_ext.bench.report import grouped
from axonn_ext.bench.results import Row
from axonn_ext.spec.grid import GridShape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_COLORS = {
    "sequential": charts.GREY, "chunked": charts.ORANGE, "fused": charts.BLUE,
    "auto": charts.GREEN, symm_mem.NAME: "#9333ea",
}  # fmt: skip
_BAR_INCHES = 0.42
_HEAD_INCHES, _PANEL_INCHES = 1.09, 4.11
_MAX_GROUPS = 14  # groups side by side; more groups go into panels below


def plot_rows(rows: Sequence[Row], subtitle: str, path: Path) -> None:
    """Draws bars of time over that of computation alone, in groups of op, grid and shape.

    A bar is labelled with its time, and its whisker is the middle half of the batches. A wrong
    result has no bar. The ending of the file's name decides the format.
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
