"""Grids for tests, and how close to a reference is close enough."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from axonn_ext import Grid, GridShape


def factorisations(world_size: int) -> list[GridShape]:
    """Every ordered way to lay `world_size` ranks out over x, y, z and data."""
    sizes = itertools.product(range(1, world_size + 1), repeat=4)
    return [GridShape(*s) for s in sizes if math.prod(s) == world_size]


@functools.cache
def grid_of(shape: GridShape) -> Grid:
    """The grid of that shape in this process, made once: groups cost milliseconds."""
    return Grid(**shape.as_dict())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest magnitude; infinite if the shapes differ or NaN came."""
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    scale = want.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    error = ((got.double() - want.double()).abs().max() / scale).item()
    return math.inf if math.isnan(error) else error


def bound(dtype: torch.dtype, terms: int) -> float:
    """Round-off of a sum of `terms` products, relative to its largest result.

    Rounding errors add up like a random walk, sqrt(terms) * eps, for terms of the result's own
    size; the factor 4 covers the largest of some thousand elements.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms)
