"""Draws the speed of each system, and where its bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.bench.optimizer.results import OptimizerRow
from axonn_ext.bench.optimizer.systems import CPU, DEVICE, DISK, TORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {TORCH: "#94a3b8", DEVICE: "#2563eb", CPU: "#16a34a", DISK: "#ea580c"}
_SHADES = {"device": "#2563eb", "host": "#16a34a", "disk": "#ea580c"}
_GREY, _INK = "#94a3b8", "#1e293b"


def plot_rows(rows: Sequence[OptimizerRow], path: Path, *, subtitle: str) -> None:
    """Draws two panels of bars, one bar for each system. The file's ending decides the format.

    The whisker of a time is its middle half. A system with wrong bits has no time.
    """
    # pyplot is not used, since it would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), dpi=150, facecolor="white")
    times, memory = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.78, bottom=0.09, wspace=0.22)
    _draw_times(times, rows)
    _draw_bytes(memory, rows)
    for axes in (times, memory):
        axes.set_xticks(range(len(rows)), [row.system for row in rows], fontsize=9)
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(colors=_INK, length=0)
    head = f"a step of AdamW, {rows[0].elements:,} elements, {rows[0].dtype}"
    figure.text(0.08, 0.93, head, fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.08, 0.88, subtitle, fontsize=8.5, color="#64748b")
    figure.savefig(path)


def _draw_times(axes: Axes, rows: Sequence[OptimizerRow]) -> None:
    for x, row in enumerate(rows):
        if row.ratio_to_floor is None or row.iqr_us is None:
            continue
        reach = row.iqr_us / row.floor_us / 2
        axes.bar(x, row.ratio_to_floor, width=0.86, color=_COLORS[row.system], yerr=reach,
                 ecolor=_INK)  # fmt: skip
        axes.annotate(f"{row.ratio_to_floor:.2f}", (x, row.ratio_to_floor + reach), xytext=(0, 3),
                      textcoords="offset points", ha="center", va="bottom", fontsize=8,
                      color=_INK)  # fmt: skip
    axes.set_ylabel("time / floor", color=_INK)


def _draw_bytes(axes: Axes, rows: Sequence[OptimizerRow]) -> None:
    bottoms = [0.0] * len(rows)
    for place, color in _SHADES.items():
        heights = [getattr(row, f"{place}_bytes") / row.elements for row in rows]
        axes.bar(range(len(rows)), heights, width=0.86, bottom=bottoms, color=color, label=place)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("bytes of an element", color=_INK)
    axes.legend(frameon=False, ncols=len(_SHADES), labelcolor=_INK, fontsize=9, loc="lower right",
                bbox_to_anchor=(1, 1))  # fmt: skip
