"""Draws tokens/s and memory of the systems, or tokens/s over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.bench.train.plan import FIXED, OURS, SINGLE, WEAK
from axonn_ext.bench.train.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    SINGLE: "#64748b", "ddp": "#16a34a", "fsdp2": "#ea580c", "tp": "#7c3aed", "tp-sp": "#c026d3",
    OURS: "#2563eb",
}  # fmt: skip
_GREY, _INK = "#94a3b8", "#1e293b"
_MIB = 2**20


def plot_rows(rows: Sequence[Row], path: Path, *, scaling: str, cores: int, subtitle: str) -> None:
    """Draws the chart, in the format of the file's name, without systems that trained wrongly."""
    # pyplot is not used, since it would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.tokens_per_s is not None]
    weighed = [row for row in timed if row.memory is not None]
    columns = 2 if scaling == FIXED and weighed else 1
    figure = Figure(figsize=(9.6, 5.0), dpi=150, facecolor="white")
    places = figure.add_gridspec(
        1, columns, left=0.09, right=0.97, top=0.8, bottom=0.2 if columns == 2 else 0.12, wspace=0.3
    )
    speed = _styled(figure.add_subplot(places[0]), "tokens/s")
    if scaling == FIXED:
        _bars(speed, timed, [row.tokens_per_s or 0.0 for row in timed])
        if columns == 2:
            memory = _styled(figure.add_subplot(places[1]), "peak memory of a rank (MiB)")
            _bars(memory, weighed, [r.memory.peak_bytes / _MIB for r in weighed if r.memory])
        title = "Training"
    else:
        _lines(speed, timed, cores=cores)
        title = "Weak scaling" if scaling == WEAK else "Strong scaling"
    ranks = max(row.num_ranks for row in rows)
    batch = max(row.batch_size for row in rows)
    title += f", {ranks} {'rank' if ranks == 1 else 'ranks'}, {batch} sequences"
    figure.text(0.09, 0.93, title, fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.09, 0.88, subtitle, fontsize=8.5, color=_GREY)
    figure.savefig(path)


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float]) -> None:
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        axes.bar(i, value, width=0.7, color=_COLORS[row.kind])
        axes.annotate(f"{value:,.0f}", (i, value), xytext=(0, 3), textcoords="offset points",
                      ha="center", fontsize=8, color=_INK)  # fmt: skip
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
            axes.plot(counts, ideal, "--", color=_INK, linewidth=1, label=label)
    axes.set_xticks(counts)
    axes.set_xlabel("ranks", color=_INK)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _styled(axes: Axes, label: str) -> Axes:
    axes.set_ylabel(label, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    return axes
