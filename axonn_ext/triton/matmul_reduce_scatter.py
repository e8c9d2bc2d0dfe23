# mypy: allow-untyped-defs, allow-untyped-calls
"""A matmul fused with a reduce-scatter: a persistent kernel that sends tiles, and one that sums.

Shapes: M rows of the product, S = M / WORLD of them this rank's share; N columns; K the inner size.

`multiply_and_send` visits the rows of rank + 1 first and its own last. It stores each tile into a
slot at the rank that owns the rows, and raises a flag there after each chunk. `reduce_slots` waits
for the chunks of every source, and adds the slots in rank order in fp32, so that the bits do not
depend on the order of arrival. The kernels need not run at the same time as each other, or as
those of peers: the first one waits for nothing, so every second one gets its flags.

The slots have two halves, which are used in turns. A rank sends the tiles of call e + 2 only after
its own sum of call e + 1, which needs tiles that every peer sends after its sum of call e. So
nobody reads a half any more when it is written again.
"""

from __future__ import annotations

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
    interpreting,
    limits_of,
    tf32_allowed,
)
from axonn_ext.triton.schedule import (
    FLAG_STRIDE,
    chunk_at,
    scatter_tile,
    scatter_tiles_in,
)
from axonn_ext.triton.signals import Signals, check_words, signal_when_last, wait_for_flag
from axonn_ext.triton.tile_configs import Problem, TileConfig
from axonn_ext.triton.tiles import multiply_tile, store_tile

REDUCE_M, REDUCE_N = 16, 128  # a program of the sum reads WORLD such tiles at a time


@triton.jit(do_not_specialize=["rows", "rank", "chunks", "chunk_tile"])
def multiply_and_send_kernel(
    a, b,  # [M, K], [K, N]: pointers or descriptors
    slots_ptr,  # [2, WORLD, S, N], this rank's, of which only the dtype matters
    slots_ptrs,  # int64 [WORLD]: addresses of every rank's slots
    flags_ptrs,  # int64 [WORLD]
    counters_ptr,  # int32 [WORLD, chunks]
    epoch_ptr,  # int32 [1]
    rows, n, k, half_stride, stride_am, stride_ak, stride_bk, stride_bn,
    rank, chunks, chunk_tile,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes tiles in the order of ScatterTiles, own share last (schedule/tile_schedule.h)."""
    epoch = tl.load(epoch_ptr)
    half = (epoch & 1).to(tl.int64)
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = WORLD * tl.cdiv(rows, BLOCK_M) * tiles_n
    blocks = tl.cdiv(k, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        owner, tile_m, tile_n = scatter_tile(index, rows, rank, tiles_n, BLOCK_M, WORLD)
        row = tile_m * BLOCK_M  # within the owner's share
        col = tile_n * BLOCK_N
        acc = multiply_tile(
            a, b, 0, owner * rows + row, col, 0, blocks,
            rows * WORLD, n, k, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, TRANSPOSED_A, TRANSPOSED_B,
            False, PRECISION, UPCAST,
        )  # fmt: skip
        slot_ptr = tl.multiple_of(tl.load(slots_ptrs + owner).to(slots_ptr.dtype), 16)
        slot_ptr += half * half_stride + (rank * rows).to(tl.int64) * n
        store_tile(slot_ptr, acc, row, col, rows, n, n, BLOCK_M, BLOCK_N)
        chunk = chunk_at(rows, chunks, chunk_tile, row)
        flag_ptr = tl.load(flags_ptrs + owner).to(epoch_ptr.dtype)
        flag_ptr += (rank * chunks + chunk) * FLAG_STRIDE
        num_parts = scatter_tiles_in(rows, chunks, chunk_tile, chunk, tiles_n, BLOCK_M)
        signal_when_last(counters_ptr + owner * chunks + chunk, num_parts, flag_ptr, epoch)


@triton.jit(do_not_specialize=["budget", "rows", "chunks", "chunk_tile"])
def reduce_slots_kernel(
    slots_ptr,  # [2, WORLD, S, N], this rank's
    out_ptr,  # [S, N]
    flags_ptr, epoch_ptr, failure_ptr, budget,
    rows, n, half_stride, chunks, chunk_tile,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Adds rows from the first to the last, waiting for their chunks; sources in rank order."""
    epoch = tl.load(epoch_ptr)
    slots_ptr += (epoch & 1).to(tl.int64) * half_stride
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = index // tiles_n * BLOCK_M
        col = index % tiles_n * BLOCK_N
        # All rows of the tile lie in one chunk, since BLOCK_M divides chunk_tile.
        chunk = chunk_at(rows, chunks, chunk_tile, row)
        r = row + tl.arange(0, BLOCK_M)
        c = col + tl.arange(0, BLOCK_N)
        offsets = r.to(tl.int64)[:, None] * n + c.to(tl.int64)[None, :]
        mask = (r < rows)[:, None] & (c < n)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for source in range(WORLD):
            flag = source * chunks + chunk
            wait_for_flag(flags_ptr, flag, epoch, failure_ptr, budget, INTERPRET)
            slot = (source * rows).to(tl.int64) * n
            acc += tl.load(slots_ptr + slot + offsets, mask=mask, other=0.0).to(tl.float32)
        store_tile(out_ptr, acc, row, col, rows, n, n, BLOCK_M, BLOCK_N)


def multiply_and_send(
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    slots_ptrs: Tensor,
    signals: Signals,
    *,
    chunk_tile: int,
    config: TileConfig | None = None,
) -> None:
    """Stores this rank's addend a @ b into its slot at the rank to which each row belongs.

        a           [M, K]            any strides
        b           [K, N]            any strides
        slots       [2, WORLD, S, N]  this rank's buffer; its stride of halves is that of all ranks,
                                      and its dtype (that of a, or float32) is that of the addends
        slots_ptrs  [WORLD]           int64: the address of every rank's `slots`, a multiple of 16

    Products are accumulated in fp32 and rounded to the dtype of the slots.

    chunk_tile  chunks begin at a multiple of this many rows from the start of a share; it must be a
                multiple of the config's block_m
    config      how to cut the product (split_k=1); by default the heuristic's config

    It runs on the current stream, after `signals.advance()`, and waits for nothing.
    """
    name = "multiply_and_send"
    check_operands(name, a, b)
    signals.check(name, a.device)
    check_words(name, "slots_ptrs", slots_ptrs, signals.world_size, torch.int64, a.device)
    m, k, n = a.size(0), a.size(1), b.size(1)
    if m % signals.world_size:
        raise ValueError(
            f"{name}: a.size(0)={m} must be divisible by the group size {signals.world_size}"
        )
    _check_slots(name, slots, signals, rows=m // signals.world_size, n=n)
    _check_chunk_tile(name, chunk_tile)
    dtypes = dict.fromkeys((a.dtype, torch.float32))
    if slots.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: slots must be {expected}, got {slots.dtype}")
    if m == 0 or n == 0:
        return
    limits = limits_of(a.device)
    x, y = Operand(a), Operand(b)
    problem = Problem(
        m, n, k, DTYPES[a.dtype], x.layout + y.layout,
        tf32=a.dtype == torch.float32 and tf32_allowed(),
        aligned=x.aligned and y.aligned, vectors=x.vectors and y.vectors,
        chunk_tile_m=chunk_tile, fused=True,
    )  # fmt: skip
    config = checked_config(name, config, problem, limits)
    rows = m // signals.world_size
    tiles = signals.world_size * triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    programs = min(limits.num_sms, tiles)
    with torch.cuda.device_of(a):
        multiply_and_send_kernel[(programs,)](
            x.source(config.block_m, config.block_k, descriptor=config.descriptors),
            y.source(config.block_k, config.block_n, descriptor=config.descriptors),
            slots, slots_ptrs, signals.flags_ptrs, signals.counters, signals.epoch,
            rows, n, k, slots.stride(0), *a.stride(), *b.stride(), signals.rank,
            signals.chunks_per_shard, chunk_tile, WORLD=signals.world_size,
            TRANSPOSED_A=x.transposed, TRANSPOSED_B=y.transposed, **constants_of(config, problem),
        )  # fmt: skip


def reduce_slots(
    slots: Tensor,
    signals: Signals,
    *,
    chunk_tile: int,
    dtype: torch.dtype | None = None,
    max_programs: int | None = None,
) -> Tensor:
    """Returns the sum of the current epoch's slots, [S, N], after every rank has sent its addend.

        slots  [2, WORLD, S, N]  this rank's buffer

    Slots are added in rank order in fp32 and rounded once. The result is bitwise repeatable, and
    any other rank would compute the same from these addends.

    chunk_tile    the same as the senders'
    dtype         the dtype of the result; by default that of the slots
    max_programs  the most SMs to use

    It runs on the current stream, and the host does not wait. If a chunk does not arrive within
    `signals.timeout_ns`, the kernel ends with an invalid result, and `signals.raise_failure` raises
    an error.
    """
    name = "reduce_slots"
    signals.check(name, slots.device)
    rows, n = (slots.size(2), slots.size(3)) if slots.dim() == 4 else (-1, -1)
    _check_slots(name, slots, signals, rows=rows, n=n)
    _check_chunk_tile(name, chunk_tile)
    out = slots.new_empty(rows, n, dtype=dtype)
    if out.numel() == 0:
        return out
    limits = limits_of(slots.device)
    tiles = triton.cdiv(rows, REDUCE_M) * triton.cdiv(n, REDUCE_N)
    # Two programs on an SM hide the latency of each other's loads.
    programs = min(tiles, max_programs or 2 * limits.num_sms)
    with torch.cuda.device_of(slots):
        reduce_slots_kernel[(programs,)](
            slots, out, signals.flags, signals.epoch, signals.failure, signals.timeout_ns,
            rows, n, slots.stride(0), signals.chunks_per_shard, chunk_tile,
            WORLD=signals.world_size, BLOCK_M=REDUCE_M, BLOCK_N=REDUCE_N,
            INTERPRET=interpreting(),
        )  # fmt: skip
    return out


def _check_chunk_tile(name: str, chunk_tile: int) -> None:
    if chunk_tile < 1 or chunk_tile % REDUCE_M:
        raise ValueError(
            f"{name}: chunk_tile must be a positive multiple of {REDUCE_M}, got {chunk_tile}"
        )


def _check_slots(name: str, slots: Tensor, signals: Signals, *, rows: int, n: int) -> None:
    shape = (2, signals.world_size, rows, n)
    if slots.shape != shape or not slots[0].is_contiguous() or slots.dtype not in DTYPES:
        raise ValueError(
            f"{name}: slots must be {[2, signals.world_size, 'S', 'N']} with S={rows}, N={n}, of "
            f"contiguous halves and a dtype of {', '.join(DTYPES.values())}, got {slots.dtype} "
            f"{list(slots.shape)} with strides {slots.stride()}"
        )
