"""The Triton kernels that are fused with a collective, on ranks that share memory.

Ranks are processes in the interpreter, and streams of one process on a GPU (test_gpu_triton.py).
Imports triton: only for processes that have chosen how kernels run.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from axonn_ext.triton.all_gather_matmul import all_gather_matmul, push_shard
from axonn_ext.triton.matmul_reduce_scatter import multiply_and_send, reduce_slots
from axonn_ext.triton.signals import Signals
from axonn_ext.triton.tile_configs import TileConfig
from grids import bound, relative_error
from triton_cases import DTYPES, draw, laid_out
from triton_interpreter import dawdle, run_ranks, shared

PLENTY = 1_000_000  # looks at a flag: minutes


@dataclass(frozen=True)
class FusedCase:
    """A call on `world_size` ranks, repeated; `rows` are those of one rank."""

    world_size: int
    rows: int
    n: int
    k: int
    dtype: str = "fp32"
    layout: str = "NN"
    chunks: int = 2
    chunk_tile: int = 16
    config: TileConfig | None = TileConfig(16, 16, 16, 4, 2)  # noqa: RUF009  (frozen)
    calls: int = 3
    first_epoch: int = 0
    seed: int = 0
    pause_s: float = 0.01  # between two chunks that arrive from outside
    device: str = "cpu"


class Ranks:
    """Flags, counters and buffers of all ranks, in memory that they share."""

    def __init__(self, case: FusedCase, *buffer_shape: int) -> None:
        world, flags = case.world_size, case.world_size * case.chunks
        self.case = case
        self.start = torch.tensor([case.first_epoch], dtype=torch.int64).to(torch.int32)
        self.buffers = [self._zeros(*buffer_shape, dtype=DTYPES[case.dtype]) for _ in range(world)]
        self.flags = [self._zeros(flags, 32, dtype=torch.int32) for _ in range(world)]
        self.failures = [self._zeros(1, dtype=torch.int32) for _ in range(world)]
        for buffer, words in zip(self.buffers, self.flags, strict=True):
            buffer.fill_(float("nan"))
            words.fill_(int(self.start))

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if self.case.device == "cpu":
            return shared(*shape, dtype=dtype)
        return torch.zeros(*shape, dtype=dtype, device=self.case.device)

    def pointers(self, tensors: list[Tensor]) -> Tensor:
        addresses = [tensor.data_ptr() for tensor in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=self.case.device)

    def signals(self, rank: int, timeout: int = PLENTY) -> Signals:
        count = self.case.world_size * self.case.chunks
        return Signals(
            rank=rank,
            world_size=self.case.world_size,
            chunks_per_shard=self.case.chunks,
            flags=self.flags[rank],
            flags_ptrs=self.pointers(self.flags),
            counters=torch.zeros(count, dtype=torch.int32, device=self.case.device),
            epoch=self.start.to(self.case.device, copy=True),
            failure=self.failures[rank],
            timeout_ns=timeout,
        )


def check_error(name: str, got: Tensor, want: Tensor, terms: int, roundings: int) -> list[str]:
    """Round-off of sums of `terms` products in fp32, and roundings to the dtype on the way."""
    limit = bound(torch.float32, max(terms, 1)) + roundings * torch.finfo(got.dtype).eps
    error = relative_error(got, want)
    return [] if error <= limit else [f"{name}: {error:.2e} > {limit:.2e}"]


# --- All-gather -> matmul ------------------------------------------------------------------------


def shard_of(case: FusedCase, rank: int, call: int) -> Tensor:
    seed = 100 * call + rank
    return draw(case.rows, case.k, dtype=DTYPES[case.dtype], device=case.device, seed=seed)


def weight_of(case: FusedCase, rank: int, call: int) -> Tensor:
    seed = 7000 + 100 * call + rank
    weight = draw(case.k, case.n, dtype=DTYPES[case.dtype], device=case.device, seed=seed)
    return laid_out(weight, case.layout[1])


def run_all_gather(case: FusedCase) -> list[str]:
    """Ranks send and multiply, several calls in a row, each a little late."""
    ranks = Ranks(case, 2, case.world_size * case.rows, case.k)

    def on_rank(rank: int) -> list[str]:
        signals, failures = ranks.signals(rank), []
        for call in range(case.calls):
            dawdle(case.seed + 10 * call + rank)
            signals.advance()
            push_shard(
                shard_of(case, rank, call), ranks.buffers[rank], ranks.pointers(ranks.buffers),
                signals, chunk_tile=case.chunk_tile, num_programs=2,
            )  # fmt: skip
            b = weight_of(case, rank, call)
            out = all_gather_matmul(
                ranks.buffers[rank], b, signals, chunk_tile=case.chunk_tile, config=case.config
            )
            signals.raise_failure("all_gather_matmul")
            rows = torch.cat([shard_of(case, r, call) for r in range(case.world_size)])
            name = f"{case} rank {rank} call {call}"
            failures += check_error(name, out, rows.double() @ b.double(), case.k, 1)
            if signals.counters.any():
                failures.append(f"{name}: counters {signals.counters.tolist()} are left")
        return failures

    return [text for found in run_ranks(case.world_size, on_rank) for text in found]


def gather_in_order(case: FusedCase, order: list[int]) -> list[str]:
    """Rank 1's kernel, while chunks arrive in any order from outside, each a little late.

    Rows that have not arrived are NaN, so a tile that does not wait for them shows.
    """
    ranks = Ranks(case, 2, case.world_size * case.rows, case.k)
    rows = torch.cat([shard_of(case, r, 0) for r in range(case.world_size)])
    b = weight_of(case, 1, 0)
    epoch = case.first_epoch + 1

    def on_rank(rank: int) -> list[str]:
        if rank == 0:  # a copy engine
            for flag in order:
                time.sleep(case.pause_s)
                begin, end = chunk_rows(case, flag)
                ranks.buffers[1][epoch % 2, begin:end] = rows[begin:end]
                ranks.flags[1][flag, 0] = epoch
            return []
        signals = ranks.signals(1)
        signals.advance()
        out = all_gather_matmul(
            ranks.buffers[1], b, signals, chunk_tile=case.chunk_tile, config=case.config
        )
        signals.raise_failure("all_gather_matmul")
        return check_error(f"{case} {order}", out, rows.double() @ b.double(), case.k, 1)

    return [text for found in run_ranks(2, on_rank) for text in found]


def chunk_rows(case: FusedCase, flag: int) -> tuple[int, int]:
    """Rows of a chunk, by the definition in core/schedule/chunk_plan.h."""
    shard, chunk = divmod(flag, case.chunks)
    tiles = -(-case.rows // case.chunk_tile)
    quotient, remainder = divmod(tiles, case.chunks)
    edges = [i * quotient + min(i, remainder) for i in (chunk, chunk + 1)]
    begin, end = (min(edge * case.chunk_tile, case.rows) for edge in edges)
    return shard * case.rows + begin, shard * case.rows + end


def gather_orders(case: FusedCase) -> list[str]:
    return [text for order in orders_of(case) for text in gather_in_order(case, order)]


def orders_of(case: FusedCase) -> list[list[int]]:
    """Flags forwards, backwards (what arrives first is needed last), and shuffled."""
    flags = list(range(case.world_size * case.chunks))
    return [flags, flags[::-1], random.Random(case.seed).sample(flags, len(flags))]


def gather_without_a_peer(case: FusedCase) -> list[str]:
    """What rank 0 raises where rank 1 sends its first chunk and no other."""
    ranks = Ranks(case, 2, case.world_size * case.rows, case.k)
    signals = ranks.signals(0, timeout=50)
    signals.advance()
    push_shard(
        shard_of(case, 0, 0), ranks.buffers[0], ranks.pointers(ranks.buffers), signals,
        chunk_tile=case.chunk_tile, num_programs=2,
    )  # fmt: skip
    ranks.flags[0][case.chunks, 0] = 1
    b = weight_of(case, 0, 0)
    all_gather_matmul(ranks.buffers[0], b, signals, chunk_tile=case.chunk_tile, config=case.config)
    try:
        signals.raise_failure("all_gather_matmul")
    except RuntimeError as error:
        return [str(error)]
    return []


# --- Matmul -> reduce-scatter --------------------------------------------------------------------


def addend_of(case: FusedCase, rank: int, call: int) -> tuple[Tensor, Tensor]:
    dtype, m = DTYPES[case.dtype], case.world_size * case.rows
    a = draw(m, case.k, dtype=dtype, device=case.device, seed=100 * call + rank)
    return laid_out(a, case.layout[0]), weight_of(case, rank, call)


def reduce_scatter_calls(case: FusedCase) -> list[tuple[list[str], list[Tensor]]]:
    """By rank: what is wrong, and the results of every call."""
    ranks = Ranks(case, 2, case.world_size, case.rows, case.n)

    def on_rank(rank: int) -> tuple[list[str], list[Tensor]]:
        signals, failures, outputs = ranks.signals(rank), [], []
        share = slice(rank * case.rows, (rank + 1) * case.rows)
        for call in range(case.calls):
            dawdle(case.seed + 10 * call + rank)
            signals.advance()
            a, b = addend_of(case, rank, call)
            slots = ranks.buffers[rank]
            multiply_and_send(
                a, b, slots, ranks.pointers(ranks.buffers), signals,
                chunk_tile=case.chunk_tile, config=case.config,
            )  # fmt: skip
            out = reduce_slots(slots, signals, chunk_tile=case.chunk_tile)
            signals.raise_failure("reduce_slots")
            pairs = [addend_of(case, r, call) for r in range(case.world_size)]
            want = sum(x.double()[share] @ y.double() for x, y in pairs)
            name = f"{case} rank {rank} call {call}"
            terms = case.k * case.world_size
            failures += check_error(name, out, want, terms, 1 + case.world_size)
            # In fp32: the interpreter rounds to bfloat16 towards zero.
            whole = reduce_slots(slots, signals, chunk_tile=case.chunk_tile, dtype=torch.float32)
            in_order = torch.zeros(case.rows, case.n)
            for addend in slots[int(signals.epoch) % 2]:
                in_order += addend.float()
            if not torch.equal(whole, in_order):
                failures.append(f"{name}: not the sum of the slots in the order of ranks")
            if signals.counters.any():
                failures.append(f"{name}: counters {signals.counters.tolist()} are left")
            outputs.append(out)
        return failures, outputs

    return run_ranks(case.world_size, on_rank)


def run_reduce_scatter(case: FusedCase) -> list[str]:
    return [text for failures, _ in reduce_scatter_calls(case) for text in failures]


def repeat_reduce_scatter(case: FusedCase) -> list[str]:
    """The same calls with other delays: the same bits."""
    runs = [reduce_scatter_calls(replace(case, seed=seed)) for seed in (1, 2)]
    failures = [text for run in runs for found, _ in run for text in found]
    for rank in range(case.world_size):
        for call in range(case.calls):
            first, *others = (run[rank][1][call] for run in runs)
            if not all(torch.equal(first, other) for other in others):
                failures.append(f"{case} rank {rank} call {call}: other bits")
    return failures


def reduce_in_order(case: FusedCase, order: list[int]) -> list[str]:
    """Rank 1's sum alone, while addends arrive in any order; NaN where they have not."""
    ranks = Ranks(case, 2, case.world_size, case.rows, case.n)
    dtype = DTYPES[case.dtype]
    addends = draw(case.world_size, case.rows, case.n, dtype=dtype, device="cpu", seed=case.seed)
    epoch = case.first_epoch + 1

    def on_rank(rank: int) -> list[str]:
        if rank == 0:
            for flag in order:
                time.sleep(case.pause_s)
                source = flag // case.chunks
                begin, end = (row - source * case.rows for row in chunk_rows(case, flag))
                ranks.buffers[1][epoch % 2, source, begin:end] = addends[source, begin:end]
                ranks.flags[1][flag, 0] = epoch
            return []
        signals = ranks.signals(1)
        signals.advance()
        out = reduce_slots(ranks.buffers[1], signals, chunk_tile=case.chunk_tile)
        signals.raise_failure("reduce_slots")
        want = addends.double().sum(0)
        return check_error(f"{case} {order}", out, want, case.world_size, 1)

    return [text for found in run_ranks(2, on_rank) for text in found]


def reduce_orders(case: FusedCase) -> list[str]:
    return [text for order in orders_of(case) for text in reduce_in_order(case, order)]


def reduce_without_a_peer(case: FusedCase) -> list[str]:
    """What rank 0 raises where no peer ever sends."""
    ranks = Ranks(case, 2, case.world_size, case.rows, case.n)
    signals = ranks.signals(0, timeout=50)
    signals.advance()
    a, b = addend_of(case, 0, 0)
    multiply_and_send(
        a, b, ranks.buffers[0], ranks.pointers(ranks.buffers), signals,
        chunk_tile=case.chunk_tile, config=case.config,
    )  # fmt: skip
    reduce_slots(ranks.buffers[0], signals, chunk_tile=case.chunk_tile)
    try:
        signals.raise_failure("reduce_slots")
    except RuntimeError as error:
        return [str(error)]
    return []
