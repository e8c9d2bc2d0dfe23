"""Draws exact match over repetitions for both arms, next to the validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.terminal.charts import BLUE, FADED, INK, ORANGE, blank_figure, draw_frame
from axonn_ext.train.memorization.report import describe
from axonn_ext.train.memorization.results import ARMS, PLAIN, ArmResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {PLAIN: ORANGE, "goldfish": BLUE}
_NAMES = {PLAIN: "plain loss", "goldfish": "Goldfish loss"}
_MARKERS = "osD^vPX*"
_PALEST = 0.4  # fraction of full color, for the first of several models


def plot_arms(arms: Sequence[ArmResult], path: Path, *, title: str, subtitle: str) -> None:
    """Plots an experiment; the file's suffix decides the format.

    One model: exact match over repetitions, and validation loss over steps. Several models: also
    exact match of the most often seen documents, and the final validation loss, both over the
    number of parameters. Bars are 95 % Wilson intervals.
    """
    arms = sorted(arms, key=lambda arm: arm.parameters)  # keeps the order of each model's arms
    models = list(dict.fromkeys(arm.model for arm in arms))
    count = 2 if len(models) == 1 else 3
    figure = blank_figure(4.8 * count + 0.4, 4.8)
    panels = figure.subplots(1, count)
    figure.subplots_adjust(
        left=0.75 / (4.8 * count), right=0.98, top=0.78, bottom=0.13, wspace=0.26
    )
    for axes in panels:
        draw_frame(axes)
    _draw_repetitions(panels[0], arms, models)
    if len(models) == 1:
        _draw_validation(panels[-1], arms)
    else:
        _draw_sizes(panels[1], arms, models)
        _draw_final_validation(panels[-1], arms)
    panels[0].legend(frameon=False, loc="upper left", labelcolor=INK, fontsize=8.5)
    left = 0.75 / (4.8 * count)
    figure.text(left, 0.93, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(left, 0.865, subtitle, fontsize=9, color=FADED)
    figure.savefig(path)


def _draw_repetitions(axes: Axes, arms: Sequence[ArmResult], models: Sequence[str]) -> None:
    """Draws the buckets at equal distances, with arms and models slightly apart."""
    seen = [bucket.repetitions for bucket in arms[0].buckets]
    for number, arm in enumerate(arms):
        shift = 0.05 * (number - (len(arms) - 1) / 2)
        places = [place + shift for place in range(len(seen))]
        size = f", {describe(arm.parameters)}" if len(models) > 1 else ""
        _draw_shares(
            axes, arm, places, range(len(seen)), look=_Look.of(arm, models),
            label=_NAMES[arm.arm] + size,
        )  # fmt: skip
    axes.set_xticks(range(len(seen)), [f"{count}" for count in seen])
    axes.set_xlabel("times that a document is seen", color=INK)
    _shares_axis(axes, "documents whose end is repeated")


def _draw_sizes(axes: Axes, arms: Sequence[ArmResult], models: Sequence[str]) -> None:
    most = arms[0].buckets[-1].repetitions
    for name in ARMS:
        own = sorted((arm for arm in arms if arm.arm == name), key=lambda arm: arm.parameters)
        for arm in own:
            look = _Look.of(arm, models)
            _draw_shares(axes, arm, [arm.parameters], [-1], look=look, label="")
        axes.plot(
            [arm.parameters for arm in own], [arm.buckets[-1].share for arm in own],
            color=_COLORS[name], linewidth=1.8, zorder=1,
        )  # fmt: skip
    _parameters_axis(axes, arms)
    _shares_axis(axes, f"repeated of those seen {most} times")


def _draw_shares(
    axes: Axes, arm: ArmResult, places: Sequence[float], buckets: Sequence[int], *, look: _Look,
    label: str,
) -> None:  # fmt: skip
    """Draws the shares of buckets with their intervals."""
    shown = [arm.buckets[number] for number in buckets]
    shares = [bucket.share for bucket in shown]
    below = [max(0.0, bucket.share - bucket.interval[0]) for bucket in shown]
    above = [max(0.0, bucket.interval[1] - bucket.share) for bucket in shown]
    axes.errorbar(
        places, shares, yerr=[below, above], color=look.color, marker=look.marker, markersize=5,
        linewidth=1.8, elinewidth=1.0, capsize=3, label=label or None, clip_on=False,
    )  # fmt: skip


def _draw_validation(axes: Axes, arms: Sequence[ArmResult]) -> None:
    from matplotlib.ticker import MaxNLocator

    for arm in arms:
        steps, losses = zip(*arm.validation, strict=True)
        axes.plot(steps, losses, color=_COLORS[arm.arm], marker=".", linewidth=1.8)
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 14 if arm.arm == PLAIN else 4),
            textcoords="offset points", ha="right", va="bottom", color=_COLORS[arm.arm],
            fontweight="bold", fontsize=9,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("validation loss (nats per token)", color=INK)


def _draw_final_validation(axes: Axes, arms: Sequence[ArmResult]) -> None:
    for name in ARMS:
        own = sorted((arm for arm in arms if arm.arm == name), key=lambda arm: arm.parameters)
        axes.plot(
            [arm.parameters for arm in own], [arm.validation_loss for arm in own],
            color=_COLORS[name], marker="o", linewidth=1.8,
        )  # fmt: skip
    _parameters_axis(axes, arms)
    axes.set_ylabel("validation loss (nats per token)", color=INK)


def _parameters_axis(axes: Axes, arms: Sequence[ArmResult]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({arm.parameters for arm in arms})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(counts, [describe(count) for count in counts])
    axes.margins(x=0.1)
    axes.set_xlabel("parameters", color=INK)


def _shares_axis(axes: Axes, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(label, color=INK)


@dataclass(frozen=True)
class _Look:
    """The style of a model in one arm: the arm sets the hue; smaller models are paler."""

    color: tuple[float, float, float]
    marker: str

    @classmethod
    def of(cls, arm: ArmResult, models: Sequence[str]) -> _Look:
        from matplotlib.colors import to_rgb

        number = models.index(arm.model)
        strength = 1.0 if len(models) == 1 else _PALEST + (1 - _PALEST) * number / (len(models) - 1)
        red, green, blue = (1 - strength * (1 - part) for part in to_rgb(_COLORS[arm.arm]))
        return cls((red, green, blue), _MARKERS[number % len(_MARKERS)])
