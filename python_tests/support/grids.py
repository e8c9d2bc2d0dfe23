"""Grids for tests, and how close to a reference is close enough, as `axonn-ext verify` has them."""

from __future__ import annotations

import functools

import torch.distributed as dist

from axonn_ext.grid import Grid
from axonn_ext.spec.grid import GridShape
from axonn_ext.verify.accuracy import bound, relative_error
from axonn_ext.verify.linears import factorisations

__all__ = ["bound", "every_grid", "factorisations", "grid_of", "relative_error"]


@functools.cache
def grid_of(shape: GridShape) -> Grid:
    """The grid of that shape in this process, made once: groups cost milliseconds.

    WorkerPool.renew_groups forgets them.
    """
    return Grid(**shape.as_dict())


def every_grid() -> list[Grid]:
    """Of the world's ranks."""
    return [grid_of(shape) for shape in factorisations(dist.get_world_size())]
