"""Sizes of the five axes of a grid, and all the grids that a number of ranks can form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

AXES = ("data", "pipe", "z", "y", "x")  # slowest to fastest in rank order: x has the fastest links
COMMUNICATING = ("x", "y", "z", "data")  # those along which collectives run
# In which gradients are summed over the axes over which backward leaves parts of them.
SUM_ORDER = ("x", "y", "z", "data")


@dataclass(frozen=True, order=True)
class GridShape:
    """Ranks along each of the five axes. Needs no process group: it can be checked before a launch.

    Raises ValueError for a size that is no whole number >= 1, and for pipe > 1, which there are no
    pipelines for yet.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1
    pipe: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.as_dict().items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"grid axis {axis} must be a whole number >= 1, got {size!r}")
        if self.pipe > 1:
            raise ValueError(
                f"grid axis pipe={self.pipe}: pipeline parallelism is not available yet; use pipe=1"
            )

    @classmethod
    def parse(cls, text: str) -> GridShape:
        """The shape that "x=2,y=2,z=1,data=1,pipe=1" (omitted = 1) or "2x2x1" (x, y, z) stands for.

        Raises ValueError, with what was expected, for anything else.
        """
        text = text.strip()
        if text == "auto":
            raise ValueError(
                "grid 'auto' is for axonn-ext train; the planner proposes grids: axonn-ext plan"
            )
        names = [f.name for f in fields(cls)]
        expected = f"grid must read like x=2,y=2,z=1 (axes {', '.join(names)}) or 2x2x1"
        if re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}x[0-9]{1,9}", text):
            x, y, z = (int(size) for size in text.split("x"))
            return cls(x=x, y=y, z=z)
        sizes: dict[str, int] = {}
        for item in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?[0-9]{1,9})\s*", item)
            if not match or match[1] not in names:
                raise ValueError(f"{expected}; got {item!r} in {text!r}")
            if match[1] in sizes:
                raise ValueError(f"{expected}; {match[1]} stands twice in {text!r}")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @property
    def size(self) -> int:
        """Ranks of the whole grid."""
        return self.x * self.y * self.z * self.data * self.pipe

    def as_dict(self) -> dict[str, int]:
        """The JSON object of five keys."""
        return {"x": self.x, "y": self.y, "z": self.z, "data": self.data, "pipe": self.pipe}

    def inner(self, axis: str) -> int:
        """Ranks of all faster axes together: the distance in rank of neighbours along the axis."""
        faster = AXES[AXES.index(axis) + 1 :]
        return math.prod(getattr(self, name) for name in faster)

    def short(self) -> str:
        """The axes with several ranks, as "x=2,y=2"; "x=1" for one rank."""
        sizes = [f"{axis}={size}" for axis, size in self.as_dict().items() if size > 1]
        return ",".join(sizes) or "x=1"

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.as_dict().items())


def grids_of(num_ranks: int) -> Iterator[GridShape]:
    """Every ordered factorisation of the number of ranks into x, y, z and data."""
    for x in divisors(num_ranks):
        for y in divisors(num_ranks // x):
            for z in divisors(num_ranks // (x * y)):
                yield GridShape(x, y, z, num_ranks // (x * y * z))


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]
