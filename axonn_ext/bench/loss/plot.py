"""Draws times over the floor, and memory over that of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.bench.loss.results import LossRow
from axonn_ext.bench.loss.systems import GOLDFISH, OURS, OURS_IN_PLACE, SYSTEMS, TORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {TORCH: "#94a3b8", OURS: "#2563eb", OURS_IN_PLACE: "#16a34a", GOLDFISH: "#d97706"}
_GREY, _INK = "#94a3b8", "#1e293b"


def plot_rows(rows: Sequence[LossRow], path: Path, *, subtitle: str) -> None:
    """Draws two panels of bars, in groups of one vocabulary. The file's ending decides the format.

    The whisker of a time is its middle half. A wrong result has no time.
    """
    # pyplot is not used, since it would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.6, 4.4), dpi=150, facecolor="white")
    times, memory = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.72, bottom=0.11, wspace=0.22)
    _draw(times, rows, lambda row: row.ratio_to_floor, "time / floor")
    _draw(memory, rows, lambda row: row.peak_over_logits, "peak beside the logits / logits")
    handles = [Patch(color=_COLORS[system], label=system) for system in SYSTEMS]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.072, 0.85), frameon=False,
                  ncols=len(handles), labelcolor=_INK, fontsize=9)  # fmt: skip
    head = f"cross-entropy, forward and backward, {rows[0].rows} rows, {rows[0].dtype}"
    figure.text(0.08, 0.93, head, fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.08, 0.88, subtitle, fontsize=8.5, color="#64748b")
    figure.savefig(path)


def _draw(
    axes: Axes, rows: Sequence[LossRow], value_of: Callable[[LossRow], float | None], label: str
) -> None:
    vocabularies = list(dict.fromkeys(row.vocab for row in rows))
    pitch = len(SYSTEMS) + 1
    for row in rows:
        value = value_of(row)
        if value is None:
            continue
        x = vocabularies.index(row.vocab) * pitch + SYSTEMS.index(row.system)
        reach = 0.0
        if value == row.ratio_to_floor and row.iqr_us is not None:
            reach = row.iqr_us / row.floor_us / 2
        axes.bar(x, value, width=0.86, color=_COLORS[row.system], yerr=reach or None, ecolor=_INK)
        axes.annotate(f"{value:.2f}", (x, value + reach), xytext=(0, 3), fontsize=8, color=_INK,
                      textcoords="offset points", ha="center", va="bottom")  # fmt: skip
    middle = (len(SYSTEMS) - 1) / 2
    axes.set_xticks([i * pitch + middle for i in range(len(vocabularies))],
                    [f"{vocab:,} columns" for vocab in vocabularies], fontsize=9)  # fmt: skip
    axes.set_ylabel(label, color=_INK)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, length=0)
