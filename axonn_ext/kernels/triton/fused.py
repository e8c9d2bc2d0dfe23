"""Launches the kernels fused with a collective, for csrc/ops/cuda/triton_gemm.cpp.

The host code in csrc/core/cuda/fused does the rest of a fused call: it moves the rows of a gather,
begins and ends the call, and adds up what the peers have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from axonn_ext.kernels.triton.all_gather_matmul import (
    all_gather_matmul_kernel,
    inner_gather_matmul_kernel,
)
from axonn_ext.kernels.triton.launch import (
    DTYPES,
    Operand,
    checked_config,
    constants_of,
    interpreting,
    limits_of,
)
from axonn_ext.kernels.triton.matmul_reduce_scatter import MAX_RANKS, multiply_and_send_kernel
from axonn_ext.kernels.triton.tile_configs import Problem, TileConfig

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Arrivals:
    """The chunks that arrive for a gather, and their flags; see core/cuda/fused/fused_gemm.h.

    Addresses are in this rank's memory. Each shard has `chunks` chunks, which begin at multiples of
    `chunk_tile` rows; a pad has their flags in the order of shards. The timeout is in nanoseconds;
    in the interpreter it is a number of polls of a flag.
    """

    rank: int
    num_ranks: int
    chunks: int
    chunk_tile: int
    pad: int
    epoch: int
    failure: int
    timeout: int


@dataclass(frozen=True)
class Departures:
    """Where the rows of a product go; see core/cuda/fused/fused_gemm.h.

    slots, pads  the addresses of this rank's slot at each rank, and of each rank's flags
    counters     the address of counters, one for each chunk of each rank; zero before and after
    """

    rank: int
    chunks: int
    slots: Sequence[int]
    pads: Sequence[int]
    counters: int
    epoch: int


def gather(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    arriving: str,
    arrivals: Arrivals,
    *,
    max_programs: int,
    config: TileConfig | None = None,
) -> None:
    """Sets out to a @ b, whose rows, columns or inner dimension arrive in chunks.

        a    [M, K]  strided      b  [K, N]  strided      out  [M, N]  contiguous

    arriving      "rows" (of a), "columns" (of b), "inner" (rows of b) or "inner_a" (columns of a)
    max_programs  the most SMs to use

    Products are accumulated in fp32 and rounded once. It runs on the current stream, and the host
    does not wait. The kernel kills the context if a chunk does not arrive within the timeout; see
    `wait_for_chunk`.
    """
    if arriving == "columns":  # the rows of the transposed product
        a, b, out = b.t(), a.t(), out.t()
    x, y = Operand(a), Operand(b)
    problem = problem_of(x, y)
    config = checked_config(f"fused {arriving}", config, problem, limits_of(a.device))
    sources = (
        x.source(config.block_m, config.block_k, descriptor=config.descriptors),
        y.source(config.block_k, config.block_n, descriptor=config.descriptors),
    )
    tiles = triton.cdiv(problem.m, config.block_m) * triton.cdiv(problem.n, config.block_n)
    grid = (min(tiles, max_programs),)
    flags = (arrivals.pad, arrivals.epoch, arrivals.failure, arrivals.timeout)
    cut = (arrivals.rank, arrivals.chunks, arrivals.chunk_tile)
    constants = constants_of(config) | {
        "WORLD": arrivals.num_ranks,
        "TRANSPOSED_B": y.transposed,
        "INTERPRET": interpreting(),
    }
    if arriving in ("rows", "columns"):
        all_gather_matmul_kernel[grid](
            *sources, out, *flags, problem.m // arrivals.num_ranks, problem.n, problem.k,
            *b.stride(), *out.stride(), *cut, **constants,
        )  # fmt: skip
    else:
        inner_gather_matmul_kernel[grid](
            *sources, out, *flags, problem.k // arrivals.num_ranks, problem.m, problem.n,
            *a.stride(), *b.stride(), *cut, TRANSPOSED_A=x.transposed, **constants,
        )  # fmt: skip


def scatter(
    a: Tensor,
    b: Tensor,
    departures: Departures,
    *,
    max_programs: int,
    config: TileConfig | None = None,
) -> None:
    """Stores the rows of a @ b into slots at their owners, and raises a flag there for each chunk.

        a  [M, K]  strided      b  [K, N]  strided      a slot  [M / WORLD, N]  of a's dtype

    Products are accumulated in fp32 and rounded to the dtype of a. It runs on the current stream,
    and waits for nothing.
    """
    x, y = Operand(a), Operand(b)
    problem = problem_of(x, y)
    config = checked_config("fused scatter", config, problem, limits_of(a.device))
    world = len(departures.slots)
    rows = problem.m // world
    tiles = triton.cdiv(rows, config.block_m)
    assert tiles >= departures.chunks, f"{tiles} tiles of rows leave in {departures.chunks} chunks"
    # Unused parameters repeat the first one, so that all have one type.
    slots, pads = (
        (*addresses, *addresses[:1] * (MAX_RANKS - world))
        for addresses in (tuple(departures.slots), tuple(departures.pads))
    )
    grid = (min(world * tiles * triton.cdiv(problem.n, config.block_n), max_programs),)
    multiply_and_send_kernel[grid](
        x.source(config.block_m, config.block_k, descriptor=config.descriptors),
        y.source(config.block_k, config.block_n, descriptor=config.descriptors),
        *slots, *pads, departures.counters, departures.epoch,
        rows, problem.n, problem.k, *a.stride(), *b.stride(), departures.rank, departures.chunks,
        WORLD=world, DTYPE=getattr(triton.language, DTYPES[a.dtype]),
        ALIGNED=all(slot % ALIGNMENT == 0 for slot in slots),
        TRANSPOSED_A=x.transposed, TRANSPOSED_B=y.transposed, **constants_of(config),
    )  # fmt: skip


def problem_of(x: Operand, y: Operand) -> Problem:
    """Returns the problem of a product fused with a collective."""
    m, k = x.tensor.shape
    return Problem(
        m, y.tensor.size(1), k, DTYPES[x.tensor.dtype], x.layout + y.layout,
        aligned=x.aligned and y.aligned, vectors=x.vectors and y.vectors, fused=True,
    )  # fmt: skip
