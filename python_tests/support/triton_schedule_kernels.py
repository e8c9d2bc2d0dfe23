"""Kernels that output the results of axonn_ext.kernels.triton.schedule, for the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from axonn_ext.kernels.triton.schedule import (
    FLAG_STRIDE,
    chunk_at,
    chunk_begin,
    epoch_reached,
    gather_tile,
    ordinal_at,
    scatter_tile,
    scatter_tiles_in,
)

COLUMNS = tl.constexpr(6)


@triton.jit
def gather_kernel(
    out_ptr, rows, chunks, chunk_tile, across, rank, BLOCK: tl.constexpr, WORLD: tl.constexpr
):
    index = tl.program_id(0)
    m, n = gather_tile(index, rows, rank, across, BLOCK, WORLD)
    last_row = tl.minimum(m * BLOCK + BLOCK, rows * WORLD) - 1
    out_ptr += index * COLUMNS
    tl.store(out_ptr, m)
    tl.store(out_ptr + 1, n)
    tl.store(out_ptr + 2, ordinal_at(rows, chunks, chunk_tile, m * BLOCK))
    tl.store(out_ptr + 3, ordinal_at(rows, chunks, chunk_tile, last_row))


@triton.jit
def scatter_kernel(
    out_ptr, rows, chunks, chunk_tile, across, rank, BLOCK: tl.constexpr, WORLD: tl.constexpr
):
    index = tl.program_id(0)
    owner, m, n = scatter_tile(index, rows, rank, across, BLOCK, WORLD)
    chunk = chunk_at(rows, chunks, chunk_tile, m * BLOCK)
    out_ptr += index * COLUMNS
    tl.store(out_ptr, owner)
    tl.store(out_ptr + 1, owner * rows + m * BLOCK)
    tl.store(out_ptr + 2, n)
    tl.store(out_ptr + 3, owner)
    tl.store(out_ptr + 4, (rank * chunks + chunk) * FLAG_STRIDE * 4)
    tl.store(out_ptr + 5, scatter_tiles_in(rows, chunks, chunk_tile, chunk, across, BLOCK))


@triton.jit
def chunk_kernel(out_ptr, rows, chunks, chunk_tile):
    chunk = tl.program_id(0)
    out_ptr += chunk * COLUMNS
    tl.store(out_ptr, chunk_begin(rows, chunks, chunk_tile, chunk))
    tl.store(out_ptr + 1, chunk_begin(rows, chunks, chunk_tile, chunk + 1))


@triton.jit
def epoch_kernel(out_ptr, values_ptr, count):
    index = tl.program_id(0)
    value = tl.load(values_ptr + index // count)
    target = tl.load(values_ptr + index % count)
    tl.store(out_ptr + index * COLUMNS, epoch_reached(value, target).to(tl.int32))


def tables(cuts: Sequence[Any], epochs: list[int]) -> list[list[str]]:
    """A line for each tile and chunk of every cut: its kind, then its numbers."""
    lines: list[list[str]] = []

    def add(kind: str, kernel: Any, count: int, columns: int, *args: Any) -> None:
        out = torch.zeros(count, COLUMNS.value, dtype=torch.int32)
        kernel[(count,)](out, *args)
        lines.extend([kind, *map(str, row)] for row in out[:, :columns].tolist())

    for cut in cuts:
        sizes = (cut.rows, cut.chunks, cut.chunk_tile)
        where = (*sizes, cut.tiles_across, cut.rank, cut.block, cut.world)
        along = triton.cdiv(cut.rows * cut.world, cut.block)
        in_shards = triton.cdiv(cut.rows, cut.block) * cut.world
        add("gather", gather_kernel, along * cut.tiles_across, 4, *where)
        add("scatter", scatter_kernel, in_shards * cut.tiles_across, 6, *where)
        add("chunk", chunk_kernel, cut.chunks, 2, *sizes)
    values = torch.tensor(epochs, dtype=torch.int32)
    add("epoch", epoch_kernel, len(epochs) ** 2, 1, values, len(epochs))
    return lines
