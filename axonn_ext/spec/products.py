"""The matrix products of a model's Linears, as one rank of a grid computes them.

Legend: m tokens of one (data, z) group; Linears [N, K] split over (r, s), see nn.Linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import LinearSpec, ModelConfig
from axonn_ext.spec.parallel import ROLES


@dataclass(frozen=True)
class Product:
    """a [m, k] @ b [k, n] of a pass of some Linears.

    layout  of a and b, as BLAS writes it: N rows, T columns
    bias    added by the product itself
    """

    product_pass: str
    linears: tuple[str, ...]
    m: int
    n: int
    k: int
    layout: str
    bias: bool


def linear_products(
    config: ModelConfig, grid: GridShape, *, batch_size: int, adds_bias: bool
) -> list[Product]:
    """Every distinct product, forward, dgrad and wgrad; the same on all ranks and in all layouts.

    batch_size: sequences of a micro-batch over all data and z coordinates. adds_bias: whether the
    device's product adds a bias, where no sum over ranks comes before it.
    """
    m = batch_size * config.sequence_length // (grid.data * grid.z)
    linears = (*config.block_linears, config.head)
    return products_of_linears(linears, grid, m=m, adds_bias=adds_bias)


def products_of_linears(
    linears: Sequence[LinearSpec], grid: GridShape, *, m: int, adds_bias: bool
) -> list[Product]:
    """Every distinct product of Linears that read m rows of a (data, z) group."""
    names: dict[tuple[str, int, int, int, str, bool], tuple[str, ...]] = {}
    for linear in linears:
        r, s = (getattr(grid, axis) for axis in ROLES[linear.role])
        k, n = linear.k // s, linear.n // r
        for key in (
            ("forward", m, n, k, "NT", linear.bias and adds_bias and s == 1),
            ("dgrad", m, k, n, "NN", False),
            ("wgrad", n, k, m, "TN", False),
        ):
            names[key] = (*names.get(key, ()), linear.name)
    return [
        Product(product_pass, named, m, n, k, layout, bias)
        for (product_pass, m, n, k, layout, bias), named in names.items()
    ]
