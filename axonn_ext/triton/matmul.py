# mypy: allow-untyped-defs, allow-untyped-calls
"""A persistent matmul with fused epilogues, for any layout of its operands.

Shapes: M rows, N columns, K the inner size; P parts of a split K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from axonn_ext.triton.launch import (
    DTYPES,
    Operand,
    check_operands,
    checked_config,
    constants_of,
    limits_of,
    num_programs,
    tf32_allowed,
)
from axonn_ext.triton.schedule import part_begin
from axonn_ext.triton.tile_configs import ACTIVATIONS, Problem, TileConfig
from axonn_ext.triton.tiles import finish_tile, multiply_tile, store_tile

if TYPE_CHECKING:  # it keeps what it measured through the compiled package, which no kernel needs
    from axonn_ext.triton.autotune import Tuner

# The tile of the reduction of a split K. A program reads P such tiles.
REDUCE_M, REDUCE_N = 16, 128


@triton.jit
def matmul_kernel(
    a, b,  # [M, K], [K, N]: pointers or descriptors
    c_ptr,  # [M, N], swiglu: [M, N / 2]; split: fp32 [P, M, N]
    bias_ptr,  # [N]
    m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes tiles in groups of GROUP_M rows, for the L2 cache; parts of K come one by one."""
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
            PRECISION, UPCAST,
        )  # fmt: skip
        if SPLIT_K > 1:
            part_ptr = c_ptr + part.to(tl.int64) * m * n
            store_tile(part_ptr, acc, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)
        else:
            out = finish_tile(acc, bias_ptr, col, n, BLOCK_M, BLOCK_N, HAS_BIAS, ACTIVATION)
            if ACTIVATION == "swiglu":
                store_tile(c_ptr, out, row, col // 2, m, n // 2, n // 2, 1, BLOCK_M, BLOCK_N // 2)
            else:
                store_tile(c_ptr, out, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)


@triton.jit
def split_k_reduce_kernel(
    parts_ptr,  # fp32 [P, M, N]
    c_ptr,  # [M, N], swiglu: [M, N / 2]
    bias_ptr,  # [N]
    m, n, part_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Adds the parts in their order, which is bitwise repeatable, and applies the epilogue."""
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
    out = finish_tile(acc, bias_ptr, col, n, BLOCK_M, BLOCK_N, HAS_BIAS, ACTIVATION)
    if ACTIVATION == "swiglu":
        store_tile(c_ptr, out, row, col // 2, m, n // 2, n // 2, 1, BLOCK_M, BLOCK_N // 2)
    else:
        store_tile(c_ptr, out, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)


def problem_of(a: Tensor, b: Tensor, *, bias: Tensor | None, activation: str | None) -> Problem:
    """Returns the problem of a call of `matmul`."""
    x, y = Operand(a), Operand(b)
    return Problem(
        a.size(0),
        b.size(1),
        a.size(1),
        DTYPES[a.dtype],
        x.layout + y.layout,
        bias is not None,
        activation,
        a.dtype == torch.float32 and tf32_allowed(),
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
    """Computes the product with this config, which must be legal, on the current stream."""
    x, y = Operand(a), Operand(b)
    m, n, k = problem.m, problem.n, problem.k
    out = a.new_empty(m, n // 2 if problem.activation == "swiglu" else n)
    split = config.split_k > 1
    target = a.new_empty(config.split_k, m, n, dtype=torch.float32) if split else out
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.split_k
    programs = num_programs(config, limits_of(a.device), a.dtype, tiles)
    epilogue = {"HAS_BIAS": bias is not None, "ACTIVATION": problem.activation}
    matmul_kernel[(programs,)](
        x.source(config.block_m, config.block_k, descriptor=config.descriptors),
        y.source(config.block_k, config.block_n, descriptor=config.descriptors),
        target, bias, m, n, k, *a.stride(), *b.stride(),
        GROUP_M=config.group_m, SPLIT_K=config.split_k,
        TRANSPOSED_A=x.transposed, TRANSPOSED_B=y.transposed,
        **constants_of(config, problem), **epilogue,
    )  # fmt: skip
    if split:
        grid = (triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
        split_k_reduce_kernel[grid](
            target, out, bias, m, n, m * n,
            BLOCK_M=REDUCE_M, BLOCK_N=REDUCE_N, SPLIT_K=config.split_k, **epilogue,
        )  # fmt: skip
    return out


def _check_epilogue(a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None) -> None:
    n = b.size(1)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"matmul: activation must be None or one of {', '.join(ACTIVATIONS)}, "
            f"got {activation!r}"
        )
    if activation == "swiglu" and n % 2:
        raise ValueError(f"matmul: swiglu needs pairs of columns, got b.size(1)={n}")
    if bias is None:
        return
    if bias.shape != (n,) or bias.dtype != a.dtype or bias.device != a.device:
        raise ValueError(
            f"matmul: bias must be {a.dtype} [{n}] on {a.device}, got {bias.dtype} "
            f"{list(bias.shape)} on {bias.device}"
        )
    if torch.is_grad_enabled() and bias.requires_grad:
        raise ValueError("matmul: bias requires grad, and there is no gradient formula")


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    config: TileConfig | None = None,
    tuner: Tuner | None = None,
) -> Tensor:
    """Returns activation(a @ b + bias).

        a     [M, K]  any strides; it is read in place, so `weight.t()` is as good as `weight`
        b     [K, N]  any strides
        bias  [N]
        returns       [M, N]; swiglu: [M, N / 2]

    Products are accumulated, and bias and activation applied, in fp32; the result is rounded once,
    to the operands' dtype: bfloat16, float16 or float32. float32 operands are rounded to tf32 only
    where torch's own matmuls may be (torch.backends.cuda.matmul.fp32_precision). Equal calls with
    equal configs give equal bits: a split K is summed in a fixed order.

    activation  None, "gelu" (tanh form, as in GPT-2), or "swiglu": silu(gate) * up, where columns
                alternate gate, up, gate, up, ... like the rows of axonn_ext.nn.MLP
    config      how to cut the product; by default the tuner's choice, else the heuristic's
    tuner       see axonn_ext.triton.autotune.Tuner

    It runs on the current stream of a GPU from sm_80 on, or on the CPU in Triton's interpreter.
    Raises ValueError or TypeError for operands that it does not support. It is not differentiable.
    """
    check_operands("matmul", a, b)
    _check_epilogue(a, b, bias, activation)
    problem = problem_of(a, b, bias=bias, activation=activation)
    limits = limits_of(a.device)
    if problem.m == 0 or problem.n == 0:
        return a.new_empty(problem.m, problem.n // 2 if activation == "swiglu" else problem.n)
    bias = bias.contiguous() if bias is not None else None
    with torch.cuda.device_of(a):
        if config is None and tuner is not None:
            config = tuner.config_for(
                problem, limits, a.device, lambda c: launch(a, b, bias, problem=problem, config=c)
            )
        config = checked_config("matmul", config, problem, limits)
        return launch(a, b, bias, problem=problem, config=config)
