"""Grids for tests, and how close to a reference is close enough, as `axonn-ext verify` has them."""

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
    """The grid of that shape in this process, made once: groups cost milliseconds.

    WorkerPool.renew_groups forgets them.
    """
    return Grid(**shape.as_dict())


def turns(shapes: list[T], number: int) -> list[T]:
    """Half of more than four. A kind of case with even and odd numbers has all of them."""
    return shapes[number % 2 :: 2] if len(shapes) > 4 else shapes


def every_grid() -> list[Grid]:
    """Of the world's ranks."""
    return [grid_of(shape) for shape in factorisations(dist.get_world_size())]
