"""Grids for tests, and the error bounds of `axonn-ext verify`."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch.distributed as dist

from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.grid import GridShape
from axonn_ext.verify.accuracy import bound, relative_error
from axonn_ext.verify.linears import factorisations

__all__ = ["bound", "every_grid", "factorisations", "grid_of", "relative_error", "turns"]


T = TypeVar("T")


@functools.cache
def grid_of(shape: GridShape) -> Grid:
    """The grid of this shape in this process, cached because making groups takes milliseconds.

    WorkerPool.renew_groups clears the cache.
    """
    return Grid(**shape.as_dict())


def turns(shapes: list[T], number: int) -> list[T]:
    """Half of the shapes, if more than four; even and odd cases together cover all."""
    return shapes[number % 2 :: 2] if len(shapes) > 4 else shapes


def every_grid() -> list[Grid]:
    """Every grid of the world's ranks."""
    return [grid_of(shape) for shape in factorisations(dist.get_world_size())]
