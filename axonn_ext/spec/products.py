"""The matrix products of a model's Linears, as one rank of a grid computes them.

Legend: m tokens of one (data, z) group; the weight [N, K] of a Linear is split over (r, s), see
nn.Linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import LinearSpec, ModelConfig
from axonn_ext.spec.parallel import ROLES

# The layouts of the products of forward, dgrad and wgrad, in BLAS letters.
PRODUCT_LAYOUTS = ("NT", "NN", "TN")


@dataclass(frozen=True)
class Product:
    """The product a [m, k] @ b [k, n] that one pass of some Linears computes.

    layout  the layouts of a and b in BLAS letters: N is stored by rows, T by columns
    bias    whether the product adds a bias itself
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
    """Returns every distinct product of forward, dgrad and wgrad.

    The products are the same on all ranks and in all layouts.
    batch_size: the sequences of a micro-batch over all data and z coordinates.
    adds_bias: whether the device adds the bias in the product if the output is not summed over
    ranks.
    """
    m = batch_size * config.sequence_length // (grid.data * grid.z)
    linears = (*config.block_linears, config.head)
    return products_of_linears(linears, grid, m=m, adds_bias=adds_bias)


def products_of_linears(
    linears: Sequence[LinearSpec], grid: GridShape, *, m: int, adds_bias: bool
) -> list[Product]:
    """Returns every distinct product of Linears that read the m rows of a (data, z) group."""
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
