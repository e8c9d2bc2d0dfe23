"""Pictures of losses: one run's, and two runs' laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.train.compare import Comparison
from axonn_ext.train.metrics import RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING_SPAN = 0.03  # of the run, in steps
_BLUE, _ORANGE, _GREY, _INK = "#2563eb", "#ea580c", "#94a3b8", "#1e293b"


def plot_loss(run: RunMetrics, path: Path, *, title: str, subtitle: str) -> None:
    """Training loss, smoothed and raw, and the evaluations, over tokens, as a PNG file."""
    figure, axes, _ = _canvas(title, subtitle)
    tokens = [m.tokens for m in run.steps]
    losses = [m.loss for m in run.steps]
    smooth = smoothed(losses)
    axes.plot(tokens, losses, color=_BLUE, alpha=0.25, linewidth=1.0)
    axes.plot(tokens, smooth, color=_BLUE, linewidth=2.2, label="training")
    if run.evaluations:
        places = [m.tokens for m in run.evaluations]
        values = [m.eval_loss for m in run.evaluations]
        axes.plot(places, values, color=_ORANGE, linestyle="", marker="o", markersize=6,
                  markerfacecolor="white", markeredgewidth=1.8, label="held-out text")  # fmt: skip
        _mark_end(axes, places[-1], values[-1], _ORANGE)
    else:
        _mark_end(axes, tokens[-1], smooth[-1], _BLUE)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)
    figure.savefig(path)


def plot_comparison(comparison: Comparison, path: Path, *, subtitle: str) -> None:
    """The training losses of two runs over each other; below, how far apart, as a PNG file."""
    names = (comparison.name, comparison.reference_name)
    figure, upper, lower = _canvas(f"{names[0]} and {names[1]}", subtitle, rows=2)
    tokens = [pair.tokens for pair in comparison.pairs]
    losses = [pair.loss for pair in comparison.pairs]
    expected = [pair.reference for pair in comparison.pairs]
    upper.plot(tokens, losses, color=_BLUE, linewidth=4.5, alpha=0.35, label=names[0])
    upper.plot(tokens, expected, "--", color=_INK, linewidth=1.3, label=names[1])
    upper.legend(frameon=False, loc="upper right", labelcolor=_INK)
    upper.tick_params(labelbottom=False)
    apart = [pair for pair in comparison.pairs if pair.difference > 0]  # a log scale has no zero
    lower.plot([pair.tokens for pair in apart], [pair.difference for pair in apart], ".",
               color=_BLUE, markersize=3)  # fmt: skip
    if apart:
        lower.set_yscale("log")
    lower.set_ylabel("relative\ndifference", color=_INK)
    figure.savefig(path)


def smoothed(values: Sequence[float], span: float = SMOOTHING_SPAN) -> list[float]:
    """The mean of each value and its neighbours within half of `span` times the number of values.

    At the start the window shrinks on both sides, so that a steep fall is not flattened; at the
    end it only loses what is not there.
    """
    reach = max(1, round(len(values) * span / 2))
    result = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        result.append(sum(window) / len(window))
    return result


def _canvas(title: str, subtitle: str, rows: int = 1) -> tuple[Figure, Axes, Axes]:
    """A figure with its title; the axes at the top and at the bottom, which share the tokens."""
    # Figure, not pyplot: that would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(9.6, 5.4), dpi=150, facecolor="white")
    ratios = [3, 1] if rows == 2 else [1]
    places = figure.add_gridspec(rows, 1, height_ratios=ratios, hspace=0.12,
                                 left=0.09, right=0.95, top=0.84, bottom=0.11)  # fmt: skip
    for row in range(rows):
        axes = figure.add_subplot(places[row])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.8)
        axes.tick_params(colors=_INK, length=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.margins(x=0.01)
    top, bottom = figure.axes[0], figure.axes[-1]
    top.set_ylabel("loss (nats per token)", color=_INK)
    bottom.set_xlabel("tokens", color=_INK)
    figure.text(0.09, 0.935, title, fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.09, 0.885, subtitle, fontsize=10, color="#64748b")
    return figure, top, bottom


def _mark_end(axes: Axes, x: float, y: float, color: str) -> None:
    axes.annotate(f"{y:.2f}", (x, y), xytext=(0, 10), textcoords="offset points", ha="center",
                  color=color, fontweight="bold")  # fmt: skip
