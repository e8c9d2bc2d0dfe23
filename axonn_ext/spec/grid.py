"""The sizes of a grid's five axes, and all grids that a number of ranks can form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from axonn_ext.spec.files.keys import check, key

AXES = ("data", "pipe", "z", "y", "x")  # slowest to fastest in rank order: x has the fastest links
COMMUNICATING = ("x", "y", "z", "data", "pipe")  # pipe has messages, and few collectives
# Where backward leaves partial sums of a gradient, they are added over the axes in this order.
SUM_ORDER = ("x", "y", "z", "data")


@dataclass(frozen=True, order=True)
class GridShape:
    """The number of ranks along each of the five axes.

    It needs no process group, so a shape can be checked before launch. Raises ValueError for a size
    that is not a whole number >= 1.
    """

    x: int = key(1, "ranks that split output features; they have the fastest links", minimum=1)
    y: int = key(1, "ranks that split input features", minimum=1)
    z: int = key(1, "ranks that split weights and the batch, as in FSDP", minimum=1)
    data: int = key(1, "replicas of the weights, which split the batch", minimum=1)
    pipe: int = key(1, "pipeline stages, which split the blocks", minimum=1)

    def __post_init__(self) -> None:
        check(self, "grid axis ")

    @classmethod
    def parse(cls, text: str) -> GridShape:
        """Returns the shape of a text like "x=2,y=2,z=1,data=1,pipe=1" or "2x2x1" (x, y, z).

        Axes that are not given have size 1. Raises ValueError, which says what was expected, for
        any other text.
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
                found = repr(item) if item == text else f"{item!r} in {text!r}"
                raise ValueError(f"{expected}; got {found}")
            if match[1] in sizes:
                raise ValueError(f"{expected}; {match[1]} appears twice in {text!r}")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def refuse_pipe(self, what: str) -> None:
        """Raises ValueError, which names `what`, for a grid with several pipeline stages.

        what: the subject of "... does not work on pipeline stages".
        """
        if self.pipe > 1:
            raise ValueError(
                f"grid axis pipe={self.pipe}: {what} does not work on pipeline stages; use pipe=1"
            )

    @property
    def size(self) -> int:
        """The number of ranks in the whole grid."""
        return self.x * self.y * self.z * self.data * self.pipe

    def as_dict(self) -> dict[str, int]:
        """Returns {axis: size} for all five axes, as it is written to JSON."""
        return {"x": self.x, "y": self.y, "z": self.z, "data": self.data, "pipe": self.pipe}

    def inner(self, axis: str) -> int:
        """Returns the product of the sizes of all faster axes.

        It is the difference in rank between neighbours along the axis.
        """
        faster = AXES[AXES.index(axis) + 1 :]
        return math.prod(getattr(self, name) for name in faster)

    def inside(self, ranks_of_host: int) -> list[str]:
        """Returns the axes of several ranks whose groups each lie within one host."""
        return [
            axis
            for axis, size in self.as_dict().items()
            if size > 1
            and (self.size <= ranks_of_host or ranks_of_host % (self.inner(axis) * size) == 0)
        ]

    def short(self) -> str:
        """Returns the axes with several ranks, like "x=2,y=2"; "x=1" for a grid of one rank."""
        sizes = [f"{axis}={size}" for axis, size in self.as_dict().items() if size > 1]
        return ",".join(sizes) or "x=1"

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.as_dict().items())


def grids_of(num_ranks: int, *, pipe: int = 1) -> Iterator[GridShape]:
    """Yields every ordered factorisation of the ranks of a stage into x, y, z and data.

    pipe: the number of stages, which must divide num_ranks.
    """
    of_stage = num_ranks // pipe
    for x in divisors(of_stage):
        for y in divisors(of_stage // x):
            for z in divisors(of_stage // (x * y)):
                yield GridShape(x, y, z, of_stage // (x * y * z), pipe)


def divisors(n: int) -> list[int]:
    """Returns all divisors of n in ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]
