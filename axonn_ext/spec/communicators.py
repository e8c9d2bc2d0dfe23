"""The groups of several ranks that a rank takes part in. On GPUs each is an NCCL communicator."""

from __future__ import annotations

from axonn_ext.spec.grid import AXES, SUM_ORDER, GridShape
from axonn_ext.spec.parallel import Overlap


def grid_groups(grid: GridShape) -> list[str]:
    """Returns the names of the groups that `Grid` makes.

    They are each axis of several ranks; "model", of x, y and z together, where two of them have
    several ranks; and "ends", of the first and the last stage of a pipeline with more than two.
    """
    axes = [axis for axis in AXES if getattr(grid, axis) > 1]
    together = ["model"] if len({"x", "y", "z"} & set(axes)) > 1 else []
    return [*axes, *together, *(["ends"] if grid.pipe > 2 else [])]


def overlap_axes(grid: GridShape) -> list[str]:
    """Returns the axes along which overlap has its own communicators, split from one over all."""
    return [axis for axis in SUM_ORDER if getattr(grid, axis) > 1]


def num_communicators(grid: GridShape, *, overlap: Overlap | None, wraps: bool = False) -> int:
    """Returns the most communicators that a rank makes in training.

    wraps: whether the last stage of a pipeline sends to the first one, too. Neighbours in a
    pipeline have a communicator in each direction.
    """
    groups = set(grid_groups(grid))
    own = overlap_axes(grid) if overlap and overlap.communicators != "c10d" else []
    at_ends = 2 + 2 * wraps + ("ends" in groups)
    of_pipe = 0 if grid.pipe == 1 else at_ends if grid.pipe == 2 else max(4, at_ends)
    whole = 1 if own else 0
    return len(groups - {"ends"}) + len(own) + whole + of_pipe
