# mypy: allow-untyped-defs, allow-untyped-calls
"""A matmul fused with a reduce-scatter: a persistent kernel that sends tiles as they are finished.

Shapes: WORLD ranks; M rows of the product; S = M / WORLD, the rows in a rank's share; N columns; K
the inner size.

The kernel visits the rows of rank + 1 first and its own last. It stores each tile into a slot at
the rank that owns the rows, and raises a flag there after each chunk. It waits for nothing. A rank
adds up its slots once it has the flags of all ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axonn_ext.kernels.triton.schedule import FLAG_STRIDE, chunk_at, scatter_tile, scatter_tiles_in
from axonn_ext.kernels.triton.signals import signal_when_last
from axonn_ext.kernels.triton.tiles import multiply_tile, store_tile

MAX_RANKS = 8  # kMaxPeers of csrc/core/cuda/fused/fused_gemm.h: addresses are kernel parameters


@triton.jit
def _one_of(index, x0, x1, x2, x3, x4, x5, x6, x7):
    """Returns the value with that index."""
    low = tl.where(index < 2, tl.where(index < 1, x0, x1), tl.where(index < 3, x2, x3))
    high = tl.where(index < 6, tl.where(index < 5, x4, x5), tl.where(index < 7, x6, x7))
    return tl.where(index < 4, low, high)


@triton.jit(
    do_not_specialize=["slot0", "slot1", "slot2", "slot3", "slot4", "slot5", "slot6", "slot7",
                       "pad0", "pad1", "pad2", "pad3", "pad4", "pad5", "pad6", "pad7",
                       "counters", "epoch_at", "rows", "rank", "chunks"]
)  # fmt: skip
def multiply_and_send_kernel(
    a, b,  # [M, K], [K, N]: pointers or descriptors
    # The addresses of the slots [S, N] of this rank at every rank, and of every rank's flags.
    slot0, slot1, slot2, slot3, slot4, slot5, slot6, slot7,
    pad0, pad1, pad2, pad3, pad4, pad5, pad6, pad7,
    counters, epoch_at,  # the addresses of int32 [WORLD, chunks], all zeros, and of the epoch
    rows, n, k, stride_am, stride_ak, stride_bk, stride_bn, rank, chunks,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,  # of the slots
    ALIGNED: tl.constexpr,  # whether slot addresses are multiples of 16
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Computes tiles in the order of ScatterTiles, own share last (schedule/tile_schedule.h).

    Chunks begin at tile edges. There must be at least as many tiles of rows as chunks, since nobody
    would raise the flag of an empty chunk.
    """
    epoch = tl.load(epoch_at.to(tl.pointer_type(tl.int32)))
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = WORLD * tl.cdiv(rows, BLOCK_M) * tiles_n
    blocks = tl.cdiv(k, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        owner, tile_m, tile_n = scatter_tile(index, rows, rank, tiles_n, BLOCK_M, WORLD)
        row = tile_m * BLOCK_M  # within the owner's share
        col = tile_n * BLOCK_N
        acc = multiply_tile(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), a, b,
            owner * rows + row, col, 0, blocks,
            rows * WORLD, n, k, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, TRANSPOSED_A, TRANSPOSED_B, UPCAST,
        )  # fmt: skip
        slot = _one_of(owner, slot0, slot1, slot2, slot3, slot4, slot5, slot6, slot7)
        slot_ptr = slot.to(tl.pointer_type(DTYPE))
        if ALIGNED:
            slot_ptr = tl.multiple_of(slot_ptr, 16)
        store_tile(slot_ptr, acc, row, col, rows, n, n, 1, BLOCK_M, BLOCK_N)
        chunk = chunk_at(rows, chunks, BLOCK_M, row)
        pad = _one_of(owner, pad0, pad1, pad2, pad3, pad4, pad5, pad6, pad7)
        flag_ptr = pad.to(tl.pointer_type(tl.int32)) + (rank * chunks + chunk) * FLAG_STRIDE
        num_parts = scatter_tiles_in(rows, chunks, BLOCK_M, chunk, tiles_n, BLOCK_M)
        counter_ptr = counters.to(tl.pointer_type(tl.int32)) + owner * chunks + chunk
        signal_when_last(counter_ptr, num_parts, flag_ptr, epoch)
