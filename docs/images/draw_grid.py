"""Draws docs/images/grid.png: the ranks of x=2, y=2, z=2 and their blocks of one Linear."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

INK, PALE = "#22303c", "#8a97a3"
AXIS_COLOR = {"x": "#d1495b", "y": "#2e86ab", "z": "#3c8d5a"}
# One hue for each (y, x); z lightens it.
BLOCK = {(0, 0): "#5b7fb9", (0, 1): "#d98c5f", (1, 0): "#69a97c", (1, 1): "#b07aa8"}
ALPHA = {0: 0.95, 1: 0.6}


def rank_of(z: int, y: int, x: int) -> int:
    return (z * 2 + y) * 2 + x


def draw_ranks(ax: Axes) -> None:
    place = lambda z, y, x: (2.2 * x + 1.15 * z, -1.9 * y + 0.85 * z)  # noqa: E731
    for axis, step in (("x", (0, 0, 1)), ("y", (0, 1, 0)), ("z", (1, 0, 0))):
        for z in range(2):
            for y in range(2):
                for x in range(2):
                    start, end = (z, y, x), (z + step[0], y + step[1], x + step[2])
                    if max(end) < 2:
                        points = list(zip(place(*start), place(*end), strict=True))
                        ax.plot(*points, color=AXIS_COLOR[axis], lw=2.5, zorder=1, alpha=0.75)
    for z in (1, 0):
        for y in range(2):
            for x in range(2):
                center = place(z, y, x)
                ax.add_patch(Circle(center, 0.36, color="white", zorder=2 + 2 * (1 - z)))
                face = Circle(center, 0.36, fc=BLOCK[y, x], alpha=ALPHA[z], ec=INK, lw=1.2)
                face.set_zorder(3 + 2 * (1 - z))
                ax.add_patch(face)
                ax.text(*center, str(rank_of(z, y, x)), ha="center", va="center", color="white",
                        fontsize=11, fontweight="bold", zorder=7)  # fmt: skip
    ax.text(0.75, -0.32, "x", color=AXIS_COLOR["x"], fontsize=15, ha="center")
    ax.text(-0.34, -0.95, "y", color=AXIS_COLOR["y"], fontsize=15, ha="center")
    ax.text(0.38, 0.62, "z", color=AXIS_COLOR["z"], fontsize=15, ha="center")
    ax.set_title("8 ranks:  Grid(x=2, y=2, z=2)", color=INK, fontsize=11)
    ax.set_xlim(-0.8, 4.1)
    ax.set_ylim(-2.6, 1.5)


def cells(ax: Axes, left: float, bottom: float, width: float, height: float, rows, columns) -> None:
    """A matrix cut into len(rows) x len(columns) cells: rows of (color or label) callables."""
    dy, dx = height / len(rows), width / len(columns)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            color, alpha, label = cell(row, column)
            corner = (left + j * dx, bottom + height - (i + 1) * dy)
            ax.add_patch(Rectangle(corner, dx, dy, fc=color, alpha=alpha, ec="white", lw=2))
            ax.text(corner[0] + dx / 2, corner[1] + dy / 2, label, ha="center", va="center",
                    color="white", fontsize=10, fontweight="bold")  # fmt: skip


def cell(row: dict[str, int], column: dict[str, int]) -> tuple[str, float, str]:
    at = row | column
    return BLOCK[at["y"], at["x"]], ALPHA[at["z"]], str(rank_of(at["z"], at["y"], at["x"]))


def brace(ax: Axes, x: float, y: float, text: str, **options: object) -> None:
    ax.text(x, y, text, ha="center", va="center", color=INK, fontsize=9, **options)


def draw_linear(ax: Axes) -> None:
    over = lambda *names: [  # noqa: E731
        dict(zip(names, (i, j), strict=True)) for i in range(2) for j in range(2)
    ]
    features = [{"y": 0}, {"y": 1}]
    cells(ax, 0.0, 0.0, 2.2, 3.2, over("z", "x"), features)
    brace(ax, 1.1, 3.75, "input  X", fontweight="bold")
    brace(ax, 1.1, 3.42, "in-features over y")
    brace(ax, -0.28, 1.6, "rows over z, x", rotation=90)
    brace(ax, 2.65, 1.6, r"$\times$")
    cells(ax, 3.5, 0.5, 2.6, 2.2, features, over("x", "z"))
    brace(ax, 4.8, 3.25, r"weight  W$^T$", fontweight="bold")
    brace(ax, 4.8, 2.92, "out-features over x, then z")
    brace(ax, 3.2, 1.6, "in-features over y", rotation=90)
    brace(ax, 6.55, 1.6, "=")
    cells(ax, 7.35, 0.0, 2.2, 3.2, over("z", "y"), [{"x": 0}, {"x": 1}])
    brace(ax, 8.45, 3.75, "output  Y", fontweight="bold")
    brace(ax, 8.45, 3.42, "out-features over x")
    brace(ax, 7.05, 1.6, "rows over z, y", rotation=90)
    ax.text(4.8, -0.55, "all-gather X over x   |   all-gather W over z   |   multiply   |   "
            "reduce-scatter Y over y", ha="center", color=INK, fontsize=9)  # fmt: skip
    ax.set_title("each rank's blocks of one Linear", color=INK, fontsize=11)
    ax.set_xlim(-0.6, 9.9)
    ax.set_ylim(-0.9, 4.1)


def main() -> None:
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.4, 3.1), width_ratios=(1, 2.2), layout="constrained"
    )
    draw_ranks(left)
    draw_linear(right)
    for ax in (left, right):
        ax.set_aspect("equal", anchor="N")
        ax.axis("off")
    figure.savefig(
        Path(__file__).with_name("grid.png"), dpi=170, bbox_inches="tight", pad_inches=0.1
    )


if __name__ == "__main__":
    main()
