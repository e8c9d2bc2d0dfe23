"""Defines the measurements: groups of ranks, products and sizes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import NamedTuple

from axonn_ext.spec.grid import COMMUNICATING, GridShape, divisors, grids_of
from axonn_ext.spec.products import PRODUCT_LAYOUTS

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SEND = "send"  # a message of a pipeline, from one stage to the next

# m, n, k of products: small ones, dominated by the cost of the call, long ones in each direction,
# and cubes.
_CPU_PRODUCTS = (
    (16, 64, 64), (64, 64, 64), (32, 256, 256), (128, 128, 128), (256, 64, 256), (64, 256, 256),
    (256, 256, 64), (256, 256, 256), (512, 512, 512), (1024, 256, 1024),
)  # fmt: skip
_GPU_PRODUCTS = (
    (256, 256, 256), (1024, 1024, 1024), (1024, 4096, 1024), (2048, 2048, 8192),
    (4096, 4096, 1024), (4096, 1024, 4096), (4096, 4096, 4096), (8192, 8192, 8192),
    (8192, 2048, 8192), (8192, 8192, 2048),
)  # fmt: skip


class Product(NamedTuple):
    """The product [m, k] @ [k, n], and the layout of its operands."""

    m: int
    n: int
    k: int
    layout: str


class GroupShape(NamedTuple):
    """The groups along `axis` of `grid`, which all communicate at once.

    They have `size` ranks each, and neighbours are `inner` ranks apart. kinds: the collectives and
    messages to time there.
    """

    axis: str
    inner: int
    size: int
    grid: GridShape
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The plan of one launch.

    by_axis: links differ by axis, not only by the places of the ranks. CPU only.
    """

    num_ranks: int
    device: str
    dtypes: tuple[str, ...]
    rounds: int
    threads: int
    by_axis: bool

    @property
    def groups(self) -> list[GroupShape]:
        """Every distinct shape of a group in grids of num_ranks ranks."""
        return group_shapes(self.num_ranks, by_axis=self.by_axis)

    @property
    def products(self) -> list[Product]:
        sizes = _GPU_PRODUCTS if self.device == "cuda" else _CPU_PRODUCTS
        return [Product(*size, layout) for size in sizes for layout in PRODUCT_LAYOUTS]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        return cls(**{**values, "dtypes": tuple(values["dtypes"])})


def group_shapes(num_ranks: int, *, by_axis: bool) -> list[GroupShape]:
    """Returns every distinct shape of a group in grids of that many ranks, by axis if requested.

    If links do not depend on the axis, collectives and messages are timed in groups of each shape.
    By axis, messages are timed only along pipe, whose only collectives are all-reduces.
    """
    found: dict[tuple[str, int, int], GroupShape] = {}
    for pipe in divisors(num_ranks):
        for size in grids_of(num_ranks, pipe=pipe):
            for axis in COMMUNICATING:
                ranks = getattr(size, axis)
                if ranks == 1:
                    continue
                kinds: tuple[str, ...] = (*COLLECTIVES, SEND)
                if by_axis:
                    kinds = ("all_reduce", SEND) if axis == "pipe" else COLLECTIVES
                shape = GroupShape(axis, size.inner(axis), ranks, size, kinds)
                found.setdefault((axis if by_axis else "", shape.inner, ranks), shape)
    return list(found.values())
