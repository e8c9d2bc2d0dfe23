"""A bar chart of rows, as a multiple of compute alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.bench.report import grouped
from axonn_ext.bench.results import Row
from axonn_ext.bench.shapes import short_grid
from axonn_ext.grid import GridShape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"sequential": "#94a3b8", "chunked": "#ea580c", "fused": "#2563eb", "auto": "#16a34a"}
_RED, _GREY, _INK = "#dc2626", "#94a3b8", "#1e293b"
_BAR_INCHES = 0.42


def plot_rows(rows: Sequence[Row], path: Path, *, subtitle: str) -> None:
    """Bars of time / compute alone, a group for each op, grid and shape, into a file.

    A bar bears its time; its whisker is the middle half of the batches. A wrong result has no bar.
    The format is that of the file's name.
    """
    # Figure, not pyplot: that would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = grouped(rows)
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    pitch = len(algorithms) + 1
    width = max(7.2, 1.6 + _BAR_INCHES * pitch * len(groups))
    figure = Figure(figsize=(width, 5.2), dpi=150, facecolor="white")
    left, right = 0.85 / width, 1 - 0.25 / width
    axes = figure.add_axes((left, 0.16, right - left, 0.63))
    tops = [1.0]
    for place, group in enumerate(groups):
        for row in group:
            tops.append(_draw_bar(axes, row, place * pitch + algorithms.index(row.algorithm)))
    axes.set_ylim(0, 1.25 * max(tops))  # room for what the bars bear
    axes.set_xlim(-1, len(groups) * pitch - 1)
    middle = (len(algorithms) - 1) / 2
    axes.set_xticks([i * pitch + middle for i in range(len(groups))], _labels(groups), fontsize=8)
    axes.set_xlabel(f"grid; {', '.join(rows[0].shape)}", color=_INK, fontsize=9)
    axes.set_ylabel("time / compute alone", color=_INK)
    floor = axes.axhline(1.0, color=_RED, linewidth=1.4, linestyle="--", label="compute alone")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    handles = [*(Patch(color=_COLORS[name], label=name) for name in algorithms), floor]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(left, 0.875), frameon=False,
                  ncols=len(handles), labelcolor=_INK, fontsize=9, borderaxespad=0,
                  borderpad=0)  # fmt: skip
    figure.text(left, 0.945, _title(rows), fontsize=14, fontweight="bold", color=_INK)
    figure.text(left, 0.9, subtitle, fontsize=8.5, color="#64748b")
    figure.savefig(path)


def _draw_bar(axes: Axes, row: Row, x: float) -> float:
    """One algorithm's bar with its time, or what takes its place; returns how high it is."""
    if row.median_us is None or row.iqr_us is None or row.ratio_to_floor is None:
        text, color, height, reach = "wrong result", _RED, 0.0, 0.0
    else:
        text, color, height = _time(row.median_us), _INK, row.ratio_to_floor
        reach = row.iqr_us / row.floor_us / 2
        axes.bar(x, height, width=0.86, color=_COLORS[row.algorithm], yerr=reach, ecolor=_INK,
                 error_kw={"elinewidth": 0.8})  # fmt: skip
    axes.annotate(text, (x, height + reach), xytext=(0, 4), textcoords="offset points",
                  ha="center", va="bottom", rotation=90, fontsize=8, color=color)  # fmt: skip
    return height + reach


def _title(rows: Sequence[Row]) -> str:
    names = ", ".join(dict.fromkeys(row.op for row in rows))
    options = dict.fromkeys(", ".join((row.dtype, *row.options.values())) for row in rows)
    return f"{names}, {'; '.join(options)}"


def _labels(groups: Sequence[Sequence[Row]]) -> list[str]:
    return [
        f"{short_grid(GridShape(**group[0].grid))}\n{', '.join(map(str, group[0].shape.values()))}"
        for group in groups
    ]


def _time(us: float) -> str:
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e-3, "ms")):
        if us < limit:
            return f"{us * scale:.3g} {unit}"
    return f"{us * 1e-6:.3g} s"
