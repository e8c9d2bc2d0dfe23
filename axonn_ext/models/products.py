"""The matrix products of a model's Linears, as one rank of a grid computes them.

Legend: m tokens of one (data, z) group; Linears [N, K] split over (r, s), see nn.Linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_ext.grid import GridShape
from axonn_ext.models.config import ModelConfig
from axonn_ext.nn.linear import ROLES

PRESETS = {
    # Radford et al. 2019; 50257 tokens rounded up to a multiple of 128.
    "gpt2-small": ModelConfig(50304, 768, 12, 12, 1024),
    "gpt2-medium": ModelConfig(50304, 1024, 24, 16, 1024),
    "gpt2-large": ModelConfig(50304, 1280, 36, 20, 1024),
    "gpt2-xl": ModelConfig(50304, 1600, 48, 25, 1024),
    # Touvron et al. 2023, arXiv:2307.09288.
    "llama2-7b": ModelConfig(
        32000, 4096, 32, 32, 4096, family="llama", intermediate_size=11008, tie_embeddings=False
    ),
    "llama2-70b": ModelConfig(
        32000, 8192, 80, 64, 4096, family="llama", num_kv_heads=8, intermediate_size=28672,
        tie_embeddings=False,
    ),
}  # fmt: skip


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


@dataclass(frozen=True)
class LinearSpec:
    """A Linear: its sizes over the whole grid."""

    name: str
    role: str
    out_features: int
    in_features: int
    bias: bool


def linear_products(
    config: ModelConfig, grid: GridShape, *, batch_size: int, adds_bias: bool
) -> list[Product]:
    """Every distinct product, forward, dgrad and wgrad; the same on all ranks and in all layouts.

    batch_size: sequences of a micro-batch over all data and z coordinates. adds_bias: whether the
    device's product adds a bias, where no sum over ranks comes before it.
    """
    m = batch_size * config.sequence_length // (grid.data * grid.z)
    hidden, has_bias = config.hidden_size, config.family == "gpt2"
    linears = [
        LinearSpec("attention.qkv", "expand", config.qkv_size, hidden, has_bias),
        LinearSpec("attention.out", "contract", hidden, hidden, has_bias),
        LinearSpec("mlp.up", "expand", config.up_size, hidden, has_bias),
        LinearSpec("mlp.down", "contract", hidden, config.mlp_size, has_bias),
        LinearSpec("lm_head", "expand", config.vocab_size, hidden, False),
    ]
    return products_of_linears(linears, grid, m=m, adds_bias=adds_bias)


def products_of_linears(
    linears: Sequence[LinearSpec], grid: GridShape, *, m: int, adds_bias: bool
) -> list[Product]:
    """Every distinct product of Linears that read m rows of a (data, z) group."""
    names: dict[tuple[str, int, int, int, str, bool], tuple[str, ...]] = {}
    for linear in linears:
        r, s = (getattr(grid, axis) for axis in ROLES[linear.role])
        k, n = linear.in_features // s, linear.out_features // r
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
