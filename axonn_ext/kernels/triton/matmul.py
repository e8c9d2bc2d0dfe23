# mypy: allow-untyped-defs, allow-untyped-calls
"""A persistent matmul with a bias, for any layout of its operands.

Shapes: M rows, N columns, K the inner size; P parts of a split K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axonn_ext.kernels.triton.launch import (
    DTYPES,
    Operand,
    constants_of,
    limits_of,
    num_programs,
)
from axonn_ext.kernels.triton.schedule import part_begin
from axonn_ext.kernels.triton.tile_configs import Problem, TileConfig
from axonn_ext.kernels.triton.tiles import add_bias, multiply_tile, store_tile

# The tile of the reduction of a split K. A program reads P such tiles.
REDUCE_M, REDUCE_N = 16, 128


@triton.jit
def matmul_kernel(
    a, b,  # [M, K], [K, N]: pointers or descriptors
    c_ptr,  # [M, N]; split: fp32 [P, M, N]
    bias_ptr,  # [N]
    m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr, HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes tiles in groups of GROUP_M rows, for the L2 cache, one part of K after another."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tiles_m * tiles_n
    blocks = tl.cdiv(k, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_tiles * SPLIT_K, tl.num_programs(0)):
        part = index // num_tiles
        tile = index % num_tiles
        group = tile // (GROUP_M * tiles_n)
        rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        in_group = tile % (GROUP_M * tiles_n)
        row = (group * GROUP_M + in_group % rows_in_group) * BLOCK_M
        col = in_group // rows_in_group * BLOCK_N
        acc = multiply_tile(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), a, b, row, col,
            part_begin(blocks, SPLIT_K, part), part_begin(blocks, SPLIT_K, part + 1),
            m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, TRANSPOSED_A, TRANSPOSED_B,
            UPCAST,
        )  # fmt: skip
        if SPLIT_K > 1:
            part_ptr = c_ptr + part.to(tl.int64) * m * n
            store_tile(part_ptr, acc, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)
        else:
            if HAS_BIAS:
                acc = add_bias(acc, bias_ptr, col, n, BLOCK_N)
            store_tile(c_ptr, acc, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)


@triton.jit
def split_k_reduce_kernel(
    parts_ptr,  # fp32 [P, M, N]
    c_ptr,  # [M, N]
    bias_ptr,  # [N]
    m, n, part_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the parts in order, so bits are repeatable, and the bias."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M
    col = tl.program_id(0) % tiles_n * BLOCK_N
    r = row + tl.arange(0, BLOCK_M)
    c = col + tl.arange(0, BLOCK_N)
    offsets = r.to(tl.int64)[:, None] * n + c.to(tl.int64)[None, :]
    mask = (r < m)[:, None] & (c < n)[None, :]
    pointers = parts_ptr + offsets
    acc = tl.load(pointers, mask=mask, other=0.0)
    for _ in range(1, SPLIT_K):
        pointers += part_stride
        acc += tl.load(pointers, mask=mask, other=0.0)
    if HAS_BIAS:
        acc = add_bias(acc, bias_ptr, col, n, BLOCK_N)
    store_tile(c_ptr, acc, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)


def problem_of(a: Tensor, b: Tensor, bias: Tensor | None) -> Problem:
    """Returns the problem of a @ b + bias."""
    x, y = Operand(a), Operand(b)
    return Problem(
        a.size(0),
        b.size(1),
        a.size(1),
        DTYPES[a.dtype],
        x.layout + y.layout,
        bias is not None,
        x.aligned and y.aligned,
        x.vectors and y.vectors,
    )


def launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    problem: Problem,
    config: TileConfig,
) -> Tensor:
    """Returns a @ b + bias, computed with this config, which must be legal, on the current stream.

        a  [M, K]  strided      b  [K, N]  strided      bias  [N]  contiguous      returns  [M, N]

    Products are accumulated, and the bias is added, in fp32; the result is rounded once. Equal
    calls with equal configs give equal bits: a split K is summed in a fixed order.
    """
    x, y = Operand(a), Operand(b)
    m, n, k = problem.m, problem.n, problem.k
    out = a.new_empty(m, n)
    split = config.split_k > 1
    target = a.new_empty(config.split_k, m, n, dtype=torch.float32) if split else out
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.split_k
    programs = num_programs(config, limits_of(a.device), a.dtype, tiles)
    matmul_kernel[(programs,)](
        x.source(config.block_m, config.block_k, descriptor=config.descriptors),
        y.source(config.block_k, config.block_n, descriptor=config.descriptors),
        target, bias, m, n, k, *a.stride(), *b.stride(),
        GROUP_M=config.group_m, SPLIT_K=config.split_k,
        TRANSPOSED_A=x.transposed, TRANSPOSED_B=y.transposed,
        HAS_BIAS=bias is not None, **constants_of(config),
    )  # fmt: skip
    if split:
        grid = (triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
        split_k_reduce_kernel[grid](
            target, out, bias, m, n, m * n,
            BLOCK_M=REDUCE_M, BLOCK_N=REDUCE_N, SPLIT_K=config.split_k,
            HAS_BIAS=bias is not None,
        )  # fmt: skip
    return out
