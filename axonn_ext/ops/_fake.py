"""Shapes, strides, dtypes and devices of every op's results, for tracing and compilation.

Values are checked by the kernels, once; here sizes are taken as right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.register_fake("axonn::all_gather")
def _(shard: Tensor, dim: int, group_name: str, group_size: int, algorithm: str) -> Tensor:
    sizes = list(shard.shape)
    sizes[dim] *= group_size
    return shard.new_empty(sizes)


@torch.library.register_fake("axonn::reduce_scatter")
def _(input: Tensor, dim: int, group_name: str, group_size: int, algorithm: str) -> Tensor:
    sizes = list(input.shape)
    sizes[dim] //= group_size
    return input.new_empty(sizes)


@torch.library.register_fake("axonn::all_reduce")
def _(input: Tensor, reduce_op: str, group_name: str, group_size: int, algorithm: str) -> Tensor:
    return input.new_empty(input.shape)


@torch.library.register_fake("axonn::all_gather_matmul")
def _(
    a_shard: Tensor, b: Tensor, gather_dim: int, group_name: str, group_size: int, algorithm: str
) -> Tensor:
    rows = a_shard.shape[0] * (group_size if gather_dim == 0 else 1)
    return a_shard.new_empty((rows, b.shape[1]))


@torch.library.register_fake("axonn::matmul_all_gather_rhs")
def _(
    a: Tensor, b_shard: Tensor, gather_dim: int, group_name: str, group_size: int, algorithm: str
) -> Tensor:
    columns = b_shard.shape[1] * (group_size if gather_dim == 1 else 1)
    return a.new_empty((a.shape[0], columns))


@torch.library.register_fake("axonn::matmul_reduce_scatter")
def _(
    a: Tensor, b: Tensor, scatter_dim: int, group_name: str, group_size: int, algorithm: str
) -> Tensor:
    rows, columns = a.shape[0], b.shape[1]
    if scatter_dim == 0:
        return a.new_empty((rows // group_size, columns))
    return a.new_empty((rows, columns // group_size))


@torch.library.register_fake("axonn::matmul_all_reduce")
def _(a: Tensor, b: Tensor, group_name: str, group_size: int, algorithm: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.register_fake("axonn::linear_forward")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_names: Sequence[str],
    group_sizes: Sequence[int],
    sharded: bool,
    gather_dim: int,
    scatter_dim: int,
    save_input: bool,
    save_weight: bool,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor]:
    r, s, z = group_sizes[:3]
    gathers = sharded and r > 1
    full_x = list(x.shape)
    y = [x.shape[0], weight.shape[0] * z]
    if gathers:
        full_x[gather_dim] *= r
    y[0] = full_x[0]
    if sharded:
        y[scatter_dim] //= s
    return (
        x.new_empty(y),
        x.new_empty(full_x if gathers and save_input else [0]),
        weight.new_empty([weight.shape[0] * z, weight.shape[1]] if z > 1 and save_weight else [0]),
    )


@torch.library.register_fake("axonn::linear_backward")
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    x_is_full: bool,
    weight_is_full: bool,
    output_mask: Sequence[bool],
    group_names: Sequence[str],
    group_sizes: Sequence[int],
    sharded: bool,
    gather_dim: int,
    scatter_dim: int,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor]:
    r, s, z = group_sizes[:3]
    full_dy = list(dy.shape)
    if sharded:
        full_dy[scatter_dim] *= s
    dx = [full_dy[0], weight.shape[1]]
    if sharded:
        dx[gather_dim] //= r
    dweight = [full_dy[1] // z, weight.shape[1]]
    shapes = (dx, dweight, [full_dy[1]])
    dx_, dw_, db_ = (
        dy.new_empty(shape if wanted else [0])
        for shape, wanted in zip(shapes, output_mask, strict=True)
    )
    return dx_, dw_, db_


@torch.library.register_fake("axonn::local_rows")
def _(
    ids: Tensor,
    first: int,
    num_rows: int,
    vocab_size: int,
    ignore_index: int | None,
    check: bool,
    label: str,
    rank: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


@torch.library.register_fake("axonn::fill_random_")
def _(
    out: Tensor,
    full_sizes: Sequence[int],
    offsets: Sequence[int],
    name: str,
    seed: int,
    distribution: str,
    a: float,
    b: float,
) -> None:
    return None
