"""Figures, axes and bars that all charts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, INK, RED, FADED = "#94a3b8", "#1e293b", "#dc2626", "#64748b"
BLUE, GREEN, ORANGE = "#2563eb", "#16a34a", "#ea580c"


def blank_figure(width: float, height: float) -> Figure:
    """Returns a white figure of that width and height in inches."""
    # pyplot is not used, since it would choose a window system and keep every figure alive.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor="white")


def new_figure(size: tuple[float, float], title: str, *lines: str, left: float = 0.08) -> Figure:
    """Returns a figure of that width and height in inches, with a title and small lines below it.

    left: the left edge of the text, as a share of the width.
    """
    figure, height = blank_figure(*size), size[1]
    figure.text(left, 1 - 0.3 / height, title, fontsize=14, fontweight="bold", color=INK)
    for place, line in enumerate(lines):
        figure.text(left, 1 - (0.53 + 0.2 * place) / height, line, fontsize=8.5, color=FADED)
    return figure


def styled(axes: Axes, label: str = "", *, size: float = 10) -> Axes:
    """Returns the axes with a y label, if any, grid lines at its ticks, and half of the frame."""
    draw_frame(axes, "y" if label else None)
    if label:
        axes.set_ylabel(label, color=INK)
    axes.tick_params(labelsize=size)
    return axes


def draw_frame(axes: Axes, lines: Literal["x", "y"] | None = "y") -> None:
    """Draws half of the frame, and grid lines below the data at the ticks of one axis, if any."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    if lines is not None:
        axes.grid(axis=lines, color=GREY, alpha=0.25, linewidth=0.8)
        axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)


def draw_bar(
    axes: Axes, x: float, height: float, text: str, *, color: str, reach: float = 0.0,
    upright: bool = False,
) -> None:  # fmt: skip
    """Draws a bar with a whisker of `height` +- reach, and above it a text, which may be upright.

    With a height of 0, only the text is drawn.
    """
    if height:
        axes.bar(x, height, width=0.86, color=color, yerr=reach or None, ecolor=INK,
                 error_kw={"elinewidth": 0.8})  # fmt: skip
    axes.annotate(text, (x, height + reach), xytext=(0, 4), textcoords="offset points",
                  ha="center", va="bottom", rotation=90 if upright else 0, fontsize=8,
                  color=INK if height else RED)  # fmt: skip


def patches(colors: Mapping[str, str]) -> list[Any]:
    """Returns the legend entries of these names and their colors."""
    from matplotlib.patches import Patch

    return [Patch(color=color, label=name) for name, color in colors.items()]


def add_legend(figure: Figure, handles: Sequence[Any], *, left: float, inches: float) -> None:
    """Adds a legend in one line, `inches` below the top."""
    top = 1 - inches / figure.get_figheight()
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(left, top), frameon=False,
                  ncols=len(handles), labelcolor=INK, fontsize=9, borderaxespad=0,
                  borderpad=0)  # fmt: skip
