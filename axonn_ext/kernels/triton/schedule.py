# mypy: allow-untyped-defs, allow-untyped-calls
"""The order of tiles and the layout of flags of csrc/core, restated for Triton kernels.

The C++ headers are the definition. The test of this module compiles them and compares every
function here with them. All shards have the same size, as gathers and scatters over ranks require.

    rows    the rows of one shard; the gathered or scattered dimension has WORLD * rows
    chunks  the number of chunks per shard
    tile    chunks begin at a multiple of this many rows from the start of their shard
"""

from __future__ import annotations

import triton
import triton.language as tl

# The distance of flags in 32-bit words: kSignalStride of csrc/core/symmetric/signal_layout.h.
FLAG_STRIDE = tl.constexpr(32)


@triton.jit
def part_begin(count, parts, index):
    """comm::part_of(count, parts, index).begin"""
    return index * (count // parts) + tl.minimum(index, count % parts)


@triton.jit
def part_at(count, parts, position):
    """comm::part_at: the part in which a position lies."""
    quotient = count // parts
    remainder = count % parts
    in_larger = remainder * (quotient + 1)
    # If the quotient is 0, no position lies in a smaller part.
    later = remainder + (position - in_larger) // tl.maximum(quotient, 1)
    return tl.where(position < in_larger, position // (quotient + 1), later)


@triton.jit
def chunk_at(rows, chunks, tile, position):
    """ChunkPlan::at(...).chunk of a position within its shard."""
    return part_at(tl.cdiv(rows, tile), chunks, position // tile)


@triton.jit
def chunk_begin(rows, chunks, tile, chunk):
    """ChunkPlan::chunk(...).begin within its shard; of `chunk` + 1 it is the end."""
    return tl.minimum(part_begin(tl.cdiv(rows, tile), chunks, chunk) * tile, rows)


@triton.jit
def ordinal_at(rows, chunks, tile, position):
    """ChunkPlan::ordinal(at(position)), of a position in the whole dimension."""
    shard = position // rows
    return shard * chunks + chunk_at(rows, chunks, tile, position - shard * rows)


@triton.jit
def gather_tile(index, rows, rank, tiles_across, BLOCK: tl.constexpr, WORLD: tl.constexpr):
    """GatherTiles::tile, along rows: (tile of rows, tile of columns)."""
    first = tl.cdiv(rank * rows, BLOCK)
    return (first + index // tiles_across) % tl.cdiv(rows * WORLD, BLOCK), index % tiles_across


@triton.jit
def scatter_tile(index, rows, rank, tiles_across, BLOCK: tl.constexpr, WORLD: tl.constexpr):
    """ScatterTiles::place and ::tile: (destination, tile of its rows, tile of columns)."""
    in_shard = tl.cdiv(rows, BLOCK)
    step = index // tiles_across
    return (rank + 1 + step // in_shard) % WORLD, step % in_shard, index % tiles_across


@triton.jit
def scatter_tiles_in(rows, chunks, tile, chunk, tiles_across, BLOCK: tl.constexpr):
    """ScatterTiles::tiles_in: the tiles that must be stored before the chunk may be signalled."""
    begin = chunk_begin(rows, chunks, tile, chunk)
    size = chunk_begin(rows, chunks, tile, chunk + 1) - begin
    return tl.cdiv(size, BLOCK) * tiles_across


@triton.jit
def epoch_reached(value, epoch):
    """comm::epoch_reached for 32-bit words; correct if the two are less than 2^31 apart."""
    return ((value.to(tl.int64) - epoch.to(tl.int64)) & 0x80000000) == 0
