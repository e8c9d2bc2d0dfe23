"""Sizes of the five axes of a grid, and all the grids that a number of ranks can form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

AXES = ("data", "pipe", "z", "y", "x")  # slowest to fastest in rank order
COMMUNICATING = ("x", "y", "z", "data")  # those along which collectives run


class GridSize(NamedTuple):
    """Ranks along each axis. `pipe` has its place and is 1 until there are pipelines."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1
    pipe: int = 1

    @property
    def size(self) -> int:
        return math.prod(self)

    def inner(self, axis: str) -> int:
        """Ranks of all faster axes together: the distance in rank of neighbours along the axis."""
        faster = AXES[AXES.index(axis) + 1 :]
        return math.prod(getattr(self, name) for name in faster)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self._asdict().items())

    def short(self) -> str:
        """The axes with several ranks, as "x=2,y=2"; "x=1" for one rank."""
        sizes = [f"{axis}={size}" for axis, size in self._asdict().items() if size > 1]
        return ",".join(sizes) or "x=1"


def grids_of(num_ranks: int) -> Iterator[GridSize]:
    """Every ordered factorisation of the number of ranks into x, y, z and data."""
    for x in divisors(num_ranks):
        for y in divisors(num_ranks // x):
            for z in divisors(num_ranks // (x * y)):
                yield GridSize(x, y, z, num_ranks // (x * y * z))


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]
