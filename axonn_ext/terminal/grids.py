"""Reads and checks grids that are given as options."""

from __future__ import annotations

from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.arguments import MOST_PROCESSES
from axonn_ext.terminal.errors import UserError


def parse_grid(option: str, text: str, *, pipe: bool = False) -> GridShape:
    """Returns the shape that the value of the option describes.

    pipe: whether there may be several pipeline stages. Raises UserError.
    """
    try:
        shape = GridShape.parse(text)
        if not pipe:
            shape.refuse_pipe("this command")
        return shape
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def check_processes(grid: GridShape) -> None:
    """Raises UserError for a grid of more processes than one machine may start."""
    if grid.size > MOST_PROCESSES:
        raise UserError(
            f"grid {grid} has {grid.size} processes, but at most {MOST_PROCESSES} are started on "
            "one machine; torchrun starts them on several"
        )
