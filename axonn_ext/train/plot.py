"""Plots the losses of one run, or of two runs on top of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.train.compare import Comparison, Pair
from axonn_ext.train.metrics import RunMetrics, StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING_SPAN = 0.03  # fraction of the run's steps
_BLUE, _ORANGE, _INK = "#2563eb", "#ea580c", "#1e293b"


def plot_loss(run: RunMetrics, path: Path, *, title: str, subtitle: str) -> None:
    """Plots training loss (smoothed and raw) and evaluations over tokens into a PNG file.

    The loss scale is below, if the run had one.
    """
    has_scale = any(m.loss_scale != 1 for m in run.steps)
    figure, axes, lower = _canvas(title, subtitle, rows=2 if has_scale else 1)
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
    if has_scale:
        axes.tick_params(labelbottom=False)
        _plot_loss_scale(lower, run.steps)
    figure.savefig(path)


def _plot_loss_scale(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    """Draws the loss scale of each step on a log scale, and marks the steps that overflowed."""
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale", color=_INK)
    axes.plot([m.tokens for m in steps], [m.loss_scale for m in steps], color=_BLUE, linewidth=1.3,
              drawstyle="steps-mid")  # fmt: skip
    skipped = [m for m in steps if m.grad_norm is None]
    axes.plot([m.tokens for m in skipped], [m.loss_scale for m in skipped], color=_ORANGE,
              linestyle="", marker="x", markersize=5, clip_on=False)  # fmt: skip
    if skipped:
        axes.text(1.0, 1.03, f"x skipped: {len(skipped)} of {len(steps)} steps", color=_ORANGE,
                  ha="right", va="bottom", transform=axes.transAxes)  # fmt: skip


def draw_comparison(comparison: Comparison, *, subtitle: str) -> Figure:
    """Returns a figure of the training losses of two runs, with their differences below."""
    names = (comparison.name, comparison.reference_name)
    figure, upper, lower = _canvas(f"{names[0]} and {names[1]}", subtitle, rows=2)
    tokens = [pair.tokens for pair in comparison.pairs]
    losses = [pair.loss for pair in comparison.pairs]
    expected = [pair.reference for pair in comparison.pairs]
    dot = "o" if len(tokens) == 1 else ""  # a line with one point would be invisible
    upper.plot(tokens, losses, f"{dot}-", color=_BLUE, linewidth=4.5, alpha=0.35, label=names[0])
    upper.plot(tokens, expected, f"{dot}--", color=_INK, linewidth=1.3, label=names[1])
    _widen(upper, [*losses, *expected])
    upper.legend(frameon=False, loc="upper right", labelcolor=_INK)
    upper.tick_params(labelbottom=False)
    _plot_differences(lower, comparison.pairs)
    figure.align_ylabels()
    return figure


def _plot_differences(axes: Axes, pairs: Sequence[Pair]) -> None:
    """Draws a dot for each step on a log scale of whole decades; zeros are counted in a text."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_ylabel("relative\ndifference", color=_INK)
    apart = [pair for pair in pairs if 0 < pair.difference < math.inf]
    num_equal = sum(pair.difference == 0 for pair in pairs)
    if num_equal:
        axes.text(1.0, 1.03, f"equal: {num_equal} of {len(pairs)} steps", color=_INK,
                  ha="right", va="bottom", transform=axes.transAxes)  # fmt: skip
    if not apart:
        axes.set_yticks([])
        return
    differences = [pair.difference for pair in apart]
    axes.set_yscale("log")
    lowest, highest = math.log10(min(differences)), math.log10(max(differences))
    bottom = math.floor(lowest)
    axes.set_ylim(10.0**bottom, 10.0 ** max(bottom + 1, math.ceil(highest)))
    axes.yaxis.set_major_locator(LogLocator(numticks=4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.plot([pair.tokens for pair in apart], differences, ".", color=_BLUE, markersize=3,
              clip_on=False)  # fmt: skip


def smoothed(values: Sequence[float], span: float = SMOOTHING_SPAN) -> list[float]:
    """Returns the mean of each value and its neighbours in a window around it.

    The window width is `span` times the number of values. At the start it shrinks on both sides, so
    that a steep fall is not flattened; at the end it just stops at the last value.
    """
    reach = max(1, round(len(values) * span / 2))
    result = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        result.append(sum(window) / len(window))
    return result


def _canvas(title: str, subtitle: str, rows: int = 1) -> tuple[Figure, Axes, Axes]:
    """Returns a titled figure with its top and bottom axes, which share the token axis."""
    from matplotlib.ticker import EngFormatter

    from axonn_ext.terminal.charts import FADED, blank_figure, draw_frame  # ranks do not need it

    figure = blank_figure(9.6, 5.4)
    ratios = [3, 1] if rows == 2 else [1]
    places = figure.add_gridspec(rows, 1, height_ratios=ratios, hspace=0.12,
                                 left=0.1, right=0.95, top=0.84, bottom=0.11)  # fmt: skip
    for row in range(rows):
        axes = figure.add_subplot(places[row], sharex=figure.axes[0] if row else None)
        draw_frame(axes)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.margins(x=0.01)
    top, bottom = figure.axes[0], figure.axes[-1]
    top.set_ylabel("loss (nats per token)", color=_INK)
    bottom.set_xlabel("tokens", color=_INK)
    figure.text(0.1, 0.935, title, fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.1, 0.885, subtitle, fontsize=10, color=FADED)
    return figure, top, bottom


def _widen(axes: Axes, values: Sequence[float]) -> None:
    """Sets limits for nearly equal values, which would otherwise have unreadable tick labels."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) - min(finite) < 0.01 * abs(max(finite)):
        axes.set_ylim(min(finite) - 0.01 * abs(min(finite)), max(finite) + 0.01 * abs(max(finite)))


def _mark_end(axes: Axes, x: float, y: float, color: str) -> None:
    axes.annotate(f"{y:.2f}", (x, y), xytext=(0, 10), textcoords="offset points", ha="center",
                  color=color, fontweight="bold")  # fmt: skip
