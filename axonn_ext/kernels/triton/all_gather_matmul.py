# mypy: allow-untyped-defs, allow-untyped-calls
"""An all-gather fused into a matmul: one persistent kernel starts on the rows that have arrived.

Shapes: WORLD ranks; M rows, N columns, K the inner size; S the rows of one rank's shard.

The shards lie one after another in this rank's workspace, into which the peers write them in
chunks; a flag announces each chunk. If the rows of A arrive, tiles are computed in the order in
which chunks come, and each waits for the chunks that it touches. If K arrives, every tile needs
every chunk. It goes through K starting from this rank's own part, and waits where it enters a
chunk; so the order of additions depends on the rank, but not on timing.

The kernels do not care who raises the flags: a copy engine does so without needing an SM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axonn_ext.kernels.triton.schedule import chunk_begin, gather_tile, ordinal_at
from axonn_ext.kernels.triton.signals import order_descriptor_loads, wait_for_chunk
from axonn_ext.kernels.triton.tiles import multiply_tile, store_tile


@triton.jit(
    do_not_specialize=["pad", "epoch_at", "failure", "timeout", "rows", "rank", "chunks",
                       "chunk_tile"]
)  # fmt: skip
def all_gather_matmul_kernel(
    a, b,  # [M, K], whose rows arrive, contiguous; [K, N]: pointers or descriptors
    c_ptr,  # [M, N]
    pad, epoch_at, failure, timeout,  # see wait_for_chunk; the address of the epoch
    rows, n, k, stride_bk, stride_bn, stride_cm, stride_cn, rank, chunks, chunk_tile,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    UPCAST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Computes tiles in the order of GatherTiles, own shard first (schedule/tile_schedule.h)."""
    epoch = tl.load(epoch_at.to(tl.pointer_type(tl.int32)))
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
                wait_for_chunk(pad, flag, chunks, epoch, rank, failure, timeout, INTERPRET)
            order_descriptor_loads(DESCRIPTORS, INTERPRET)
        there = last
        acc = multiply_tile(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), a, b, row, tile_n * BLOCK_N, 0, blocks,
            m, n, k, k, 1, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, False, TRANSPOSED_B, UPCAST,
        )  # fmt: skip
        store_tile(c_ptr, acc, row, tile_n * BLOCK_N, m, n, stride_cm, stride_cn, BLOCK_M, BLOCK_N)


@triton.jit(
    do_not_specialize=["pad", "epoch_at", "failure", "timeout", "rows", "rank", "chunks",
                       "chunk_tile"]
)  # fmt: skip
def inner_gather_matmul_kernel(
    a, b,  # [M, K], [K, N]: pointers or descriptors; the K of one of them arrives
    c_ptr,  # [M, N], rows contiguous
    pad, epoch_at, failure, timeout,  # see wait_for_chunk; the address of the epoch
    rows, m, n, stride_am, stride_ak, stride_bk, stride_bn, rank, chunks, chunk_tile,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr,
    UPCAST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sums over K = WORLD * rows per tile, own part first. Programs wait in their first tile."""
    epoch = tl.load(epoch_at.to(tl.pointer_type(tl.int32)))
    k = rows * WORLD
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    blocks = tl.cdiv(k, BLOCK_K)
    own_block = tl.cdiv(rank * rows, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = index // tiles_n * BLOCK_M
        col = index % tiles_n * BLOCK_N
        waits = index == tl.program_id(0)
        # Once everything has arrived, K is two pieces: from the own part on, then what precedes it.
        pieces = tl.where(waits, WORLD * chunks, 2)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for piece in range(pieces):
            begin = tl.where(piece == 0, own_block, 0)
            end = tl.where(piece == 0, blocks, own_block)
            if waits:
                flag = (rank * chunks + piece) % (WORLD * chunks)
                shard = flag // chunks * rows
                chunk = flag % chunks
                # The blocks that begin in this chunk; the last one may end in a later chunk.
                chunk_start = shard + chunk_begin(rows, chunks, chunk_tile, chunk)
                begin = tl.cdiv(chunk_start, BLOCK_K)
                end = tl.cdiv(shard + chunk_begin(rows, chunks, chunk_tile, chunk + 1), BLOCK_K)
                last = ordinal_at(rows, chunks, chunk_tile, tl.minimum(end * BLOCK_K, k) - 1)
                last = tl.where(end > begin, last, flag)
                for needed in range(flag, last + 1):
                    wait_for_chunk(pad, needed, chunks, epoch, rank, failure, timeout, INTERPRET)
                order_descriptor_loads(DESCRIPTORS, INTERPRET)
            acc = multiply_tile(
                acc, a, b, row, col, begin, end,
                m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, TRANSPOSED_A, TRANSPOSED_B,
                UPCAST,
            )  # fmt: skip
        store_tile(c_ptr, acc, row, col, m, n, n, 1, BLOCK_M, BLOCK_N)
