# mypy: allow-untyped-defs, allow-untyped-calls
"""Device helpers shared by our Triton matmuls: loading operands, the loop over K, storing.

Shapes: M, N, K of the product, R rows and C columns of any matrix. A matrix is given as a pointer
with two strides, or as a tensor descriptor of its contiguous rows, or columns (TRANSPOSED).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source,  # pointer to [R, C], or a descriptor: see DESCRIPTOR
    row, col, rows, cols, stride_row, stride_col,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    DESCRIPTOR: tl.constexpr,  # of [R, C], of [C, R] if TRANSPOSED
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Loads a tile [BLOCK_R, BLOCK_C], with zeros beyond the matrix."""
    if DESCRIPTOR:
        if TRANSPOSED:
            tile = source.load([col, row]).T
        else:
            tile = source.load([row, col])
    else:
        r = row + tl.arange(0, BLOCK_R)
        c = col + tl.arange(0, BLOCK_C)
        offsets = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
        tile = tl.load(source + offsets, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(
    target_ptr,  # [R, C]
    tile, row, col, rows, cols, stride_row, stride_col,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores the part of the tile that lies in the matrix, cast to its dtype."""
    r = row + tl.arange(0, BLOCK_R)
    c = col + tl.arange(0, BLOCK_C)
    offsets = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tl.store(target_ptr + offsets, tile.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def multiply_tile(
    acc,  # fp32 [BLOCK_M, BLOCK_N]
    a, b,  # [M, K], [K, N]: see load_tile
    row, col, first, last,
    m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns acc plus the product at (row, col) of blocks [first, last) of K."""
    for block in tl.range(first, last):
        depth = block * BLOCK_K
        x = load_tile(a, row, depth, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K,
                      DESCRIPTORS, TRANSPOSED_A)  # fmt: skip
        y = load_tile(b, depth, col, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N,
                      DESCRIPTORS, TRANSPOSED_B)  # fmt: skip
        if UPCAST:  # the interpreter would multiply the bits of 16-bit floats, or sum in them
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def add_bias(acc, bias_ptr, col, n, BLOCK_N: tl.constexpr):
    """Adds the bias [N] to a tile of fp32 whose first column is col."""
    c = col + tl.arange(0, BLOCK_N)
    return acc + tl.load(bias_ptr + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
