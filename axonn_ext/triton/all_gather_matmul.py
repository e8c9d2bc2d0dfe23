# mypy: allow-untyped-defs, allow-untyped-calls
"""An all-gather fused into a matmul: one persistent kernel starts on the rows that have arrived.

Shapes: M rows on all ranks together, S = M / WORLD rows of one shard; N columns; K the inner size.

`push_shard` sends this rank's rows to all ranks in chunks, and raises a flag at the receiver after
each chunk. `all_gather_matmul` visits tiles in the order in which chunks arrive, and waits for the
chunks that a tile needs. Something else than push_shard may raise the flags, such as a copy engine.
The two kernels must be able to run at the same time: on different streams, and with `max_programs`
leaving SMs to the sender.

The buffer of gathered rows has two halves, which are used in turns. A rank sends the rows of call
e + 2 only after its own call e + 1, which needs rows that every peer sends after its call e. So
nobody reads a half any more when it is written again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
from axonn_ext.triton.schedule import FLAG_STRIDE, chunk_begin, gather_tile, ordinal_at
from axonn_ext.triton.signals import (
    Signals,
    check_words,
    order_descriptor_loads,
    signal_when_last,
    wait_for_flag,
)
from axonn_ext.triton.tile_configs import DESCRIPTOR_ALIGNMENT, Problem, TileConfig
from axonn_ext.triton.tiles import multiply_tile, store_tile

PUSH_BLOCK = 4096  # elements that a program of the sender copies at a time


@triton.jit(do_not_specialize=["rows", "rank", "chunks", "chunk_tile"])
def push_shard_kernel(
    shard_ptr,  # [S, K], contiguous
    gathered_ptrs,  # int64 [WORLD]: addresses of [2, M, K]
    flags_ptrs,  # int64 [WORLD]
    counters_ptr,  # int32 [WORLD, chunks]
    epoch_ptr,  # int32 [1]
    rows, k, half_stride, rank, chunks, chunk_tile,
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every program copies its part of each chunk; the last program to finish raises the flag."""
    epoch = tl.load(epoch_ptr)
    half = (epoch & 1).to(tl.int64)
    num_programs = tl.num_programs(0)
    for step in range(WORLD):
        # Rank r visits shard r + t in its step t. So rank - step visits this shard in step `step`.
        peer = (rank - step + WORLD) % WORLD
        target_ptr = tl.multiple_of(tl.load(gathered_ptrs + peer).to(shard_ptr.dtype), 16)
        target_ptr += half * half_stride + (rank * rows).to(tl.int64) * k
        peer_flags_ptr = tl.load(flags_ptrs + peer).to(epoch_ptr.dtype)
        for chunk in range(chunks):
            begin = chunk_begin(rows, chunks, chunk_tile, chunk).to(tl.int64) * k
            end = chunk_begin(rows, chunks, chunk_tile, chunk + 1).to(tl.int64) * k
            first = begin + tl.program_id(0).to(tl.int64) * BLOCK
            for at in range(first, end, num_programs * BLOCK):
                offsets = at + tl.arange(0, BLOCK)
                mask = offsets < end
                values = tl.load(shard_ptr + offsets, mask=mask)
                tl.store(target_ptr + offsets, values, mask=mask)
            flag_ptr = peer_flags_ptr + (rank * chunks + chunk) * FLAG_STRIDE
            counter_ptr = counters_ptr + peer * chunks + chunk
            signal_when_last(counter_ptr, num_programs, flag_ptr, epoch)


@triton.jit(do_not_specialize=["budget", "count"])
def await_chunks_kernel(
    flags_ptr, epoch_ptr, failure_ptr, budget, count, INTERPRET: tl.constexpr
):  # fmt: skip
    """Waits until all chunks have arrived, as a matmul without columns must do for its peers."""
    epoch = tl.load(epoch_ptr)
    for flag in range(count):
        wait_for_flag(flags_ptr, flag, epoch, failure_ptr, budget, INTERPRET)


@triton.jit(do_not_specialize=["budget", "rows", "rank", "chunks", "chunk_tile"])
def all_gather_matmul_kernel(
    a, b,  # [2, M, K] pointer or descriptor, [K, N]
    c_ptr,  # [M, N]
    flags_ptr, epoch_ptr, failure_ptr, budget,
    rows, n, k, half_stride, stride_bk, stride_bn, rank, chunks, chunk_tile,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Computes tiles in the order of GatherTiles, own shard first (schedule/tile_schedule.h)."""
    epoch = tl.load(epoch_ptr)
    half = epoch & 1
    source = a
    if not DESCRIPTORS:
        source += half.to(tl.int64) * half_stride
    m = rows * WORLD
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    blocks = tl.cdiv(k, BLOCK_K)
    there = -1  # the chunk of the last tile, which has arrived
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_m, tile_n = gather_tile(index, rows, rank, tiles_n, BLOCK_M, WORLD)
        row = tile_m * BLOCK_M
        first = ordinal_at(rows, chunks, chunk_tile, row)
        last = ordinal_at(rows, chunks, chunk_tile, tl.minimum(row + BLOCK_M, m) - 1)
        if (first != there) | (last != there):
            for flag in range(first, last + 1):
                wait_for_flag(flags_ptr, flag, epoch, failure_ptr, budget, INTERPRET)
            order_descriptor_loads(DESCRIPTORS, INTERPRET)
        there = last
        acc = multiply_tile(
            source, b, half, row, tile_n * BLOCK_N, 0, blocks,
            m, n, k, k, 1, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, False, TRANSPOSED_B,
            True, PRECISION, UPCAST,
        )  # fmt: skip
        store_tile(c_ptr, acc, row, tile_n * BLOCK_N, m, n, n, BLOCK_M, BLOCK_N)


def _check_gathered(name: str, gathered: Tensor, signals: Signals) -> None:
    if gathered.dim() != 3 or gathered.size(0) != 2 or not gathered[0].is_contiguous():
        raise ValueError(
            f"{name}: gathered must be [2, M, K] of contiguous halves, got {list(gathered.shape)} "
            f"with strides {gathered.stride()}"
        )
    if gathered.size(1) % signals.world_size:
        raise ValueError(
            f"{name}: gathered.size(1)={gathered.size(1)} must be divisible by the group size "
            f"{signals.world_size}"
        )


def _check_chunk_tile(name: str, chunk_tile: int) -> None:
    if chunk_tile < 1:
        raise ValueError(f"{name}: chunk_tile must be positive, got {chunk_tile}")


def _descriptors_read(gathered: Tensor) -> bool:
    """Whether one tensor descriptor can read both halves."""
    pitch = gathered.stride(0) * gathered.element_size()
    return Operand(gathered[0]).aligned and pitch % DESCRIPTOR_ALIGNMENT == 0


def _source(gathered: Tensor, config: TileConfig) -> Any:
    """Returns the source for the kernel's load_tile: a pointer or a descriptor."""
    if not config.descriptors:
        return gathered
    return TensorDescriptor.from_tensor(gathered, [1, config.block_m, config.block_k])


def push_shard(
    shard: Tensor,
    gathered: Tensor,
    gathered_ptrs: Tensor,
    signals: Signals,
    *,
    chunk_tile: int,
    num_programs: int = 8,
) -> None:
    """Sends this rank's rows to every rank's `gathered`, its own included, for the current epoch.

        shard          [S, K]     contiguous
        gathered       [2, M, K]  this rank's buffer; its stride of halves is that of all ranks
        gathered_ptrs  [WORLD]    int64: the address of every rank's `gathered`, a multiple of 16

    chunk_tile    chunks begin at a multiple of this many rows from the start of a shard
    num_programs  the most SMs that copy

    It runs on the current stream, after `signals.advance()`. The matmul of the same call must not
    wait for it, and the next call must wait for both. Empty shards are not sent.
    """
    name = "push_shard"
    signals.check(name, shard.device)
    _check_gathered(name, gathered, signals)
    check_words(name, "gathered_ptrs", gathered_ptrs, signals.world_size, torch.int64, shard.device)
    world, rows, k = signals.world_size, gathered.size(1) // signals.world_size, gathered.size(2)
    if shard.shape != (rows, k) or shard.dtype != gathered.dtype or not shard.is_contiguous():
        raise ValueError(
            f"{name}: shard must be a contiguous {gathered.dtype} [{rows}, {k}], got "
            f"{shard.dtype} {list(shard.shape)} with strides {shard.stride()}"
        )
    _check_chunk_tile(name, chunk_tile)
    if shard.numel() == 0:
        return
    with torch.cuda.device_of(shard):
        push_shard_kernel[(num_programs,)](
            shard, gathered_ptrs, signals.flags_ptrs, signals.counters, signals.epoch,
            rows, k, gathered.stride(0), signals.rank, signals.chunks_per_shard, chunk_tile,
            WORLD=world, BLOCK=PUSH_BLOCK, num_warps=8,
        )  # fmt: skip


def all_gather_matmul(
    gathered: Tensor,
    b: Tensor,
    signals: Signals,
    *,
    chunk_tile: int,
    config: TileConfig | None = None,
    max_programs: int | None = None,
) -> Tensor:
    """Returns the gathered rows times b, [M, N]; it starts before all rows have arrived.

        gathered  [2, M, K]  this rank's buffer; the half of the current epoch is read
        b         [K, N]     any strides

    Products are accumulated in fp32 and rounded once. The bits do not depend on the order of
    arrival. Flags must lie in this GPU's memory.

    chunk_tile    the same as the senders'
    config        how to cut the product (split_k=1); by default the heuristic's config
    max_programs  the most SMs to use; by default all of them, which leaves none to a sender that is
                  a kernel and has not started

    It runs on the current stream, and the host does not wait. If a chunk does not arrive within
    `signals.timeout_ns`, the kernel ends with an invalid result, and `signals.raise_failure` raises
    an error.
    """
    name = "all_gather_matmul"
    _check_gathered(name, gathered, signals)
    check_operands(name, gathered[0], b, a_name="gathered[0]")
    signals.check(name, b.device)
    _check_chunk_tile(name, chunk_tile)
    m, k, n = gathered.size(1), gathered.size(2), b.size(1)
    if m == 0 or k == 0:  # nothing is sent
        return b.new_zeros(m, n)
    if n == 0:
        # This rank may send again only after all chunks have arrived (see the halves above).
        count = signals.world_size * signals.chunks_per_shard
        with torch.cuda.device_of(b):
            await_chunks_kernel[(1,)](
                signals.flags, signals.epoch, signals.failure, signals.timeout_ns, count,
                INTERPRET=interpreting(),
            )  # fmt: skip
        return b.new_empty(m, n)
    out = b.new_empty(m, n)
    limits = limits_of(b.device)
    operand = Operand(b)
    problem = Problem(
        m, n, k, DTYPES[b.dtype], "N" + operand.layout,
        tf32=b.dtype == torch.float32 and tf32_allowed(),
        aligned=operand.aligned and _descriptors_read(gathered),
        vectors=operand.vectors and Operand(gathered[0]).vectors, fused=True,
    )  # fmt: skip
    config = checked_config(name, config, problem, limits)
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    programs = min(limits.num_sms, max_programs or limits.num_sms, tiles)
    with torch.cuda.device_of(b):
        all_gather_matmul_kernel[(programs,)](
            _source(gathered, config), operand.source(
                config.block_k, config.block_n, descriptor=config.descriptors
            ),
            out, signals.flags, signals.epoch, signals.failure, signals.timeout_ns,
            m // signals.world_size, n, k, gathered.stride(0), *b.stride(), signals.rank,
            signals.chunks_per_shard, chunk_tile, WORLD=signals.world_size,
            TRANSPOSED_B=operand.transposed, INTERPRET=interpreting(),
            **constants_of(config, problem),
        )  # fmt: skip
    return out
