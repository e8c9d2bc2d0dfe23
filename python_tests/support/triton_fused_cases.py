"""The Triton kernels that are fused with a collective, on ranks that share memory.

Ranks are processes in the interpreter. Around the kernels, this file does in Python what the host
code of csrc/core/cuda/fused does: count the epoch, deliver the rows, and wait for the end of the
previous call. It imports triton, so import it only after choosing how kernels run.
"""

from __future__ import annotations

import random
import time
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from axonn_ext.kernels.triton.fused import Arrivals, Departures, gather, scatter
from axonn_ext.kernels.triton.schedule import FLAG_STRIDE
from axonn_ext.kernels.triton.tile_configs import TileConfig
from grids import bound, relative_error
from triton_cases import DTYPES, draw, laid_out
from triton_interpreter import dawdle, run_ranks, shared

PLENTY = 1_000_000  # polls of a flag, which take minutes
RECORD = ("state", "rank", "peer", "chunk", "expected", "seen")  # the words of a SpinFailure


@dataclass(frozen=True)
class FusedCase:
    """A repeated call on `world_size` ranks. The whole product is [m, n] = [m, k] @ [k, n]."""

    world_size: int
    m: int
    n: int
    k: int
    arriving: str = "rows"
    dtype: str = "bf16"
    layout: str = "NN"  # of a and b; does not apply to the operand that arrives
    chunks: int = 2
    chunk_tile: int = 1
    config: TileConfig | None = TileConfig(16, 16, 16, 4, 2)  # noqa: RUF009  (frozen)
    programs: int = 3
    calls: int = 3
    first_epoch: int = 0
    seed: int = 0
    pause_s: float = 0.01  # between two chunks in gather_in_order
    timeout: int = PLENTY

    @property
    def gathered(self) -> tuple[int, int]:
        """The number of rows of all ranks together, and their length."""
        return {
            "rows": (self.m, self.k),
            "columns": (self.n, self.k),
            "inner": (self.k, self.n),
            "inner_a": (self.k, self.m),
        }[self.arriving]


class Ranks:
    """Workspaces, flags, counters, epochs and records of all ranks, in memory that they share."""

    def __init__(self, case: FusedCase, *workspace: int) -> None:
        world, flags = case.world_size, case.world_size * case.chunks
        self.case = case
        self.start = int(torch.tensor(case.first_epoch, dtype=torch.int64).to(torch.int32))
        dtype = DTYPES[case.dtype]
        self.workspaces = [shared(*workspace, dtype=dtype) for _ in range(world)]
        # The flags of chunks are followed by one per rank, which it raises at the end of its call.
        self.pads = [
            shared(flags + world, FLAG_STRIDE.value, dtype=torch.int32) for _ in range(world)
        ]
        self.epochs = [shared(1, dtype=torch.int32) for _ in range(world)]
        self.counters = [shared(flags, dtype=torch.int32) for _ in range(world)]
        self.records = [shared(len(RECORD), dtype=torch.int32) for _ in range(world)]
        for one in (*self.pads, *self.epochs):
            one.fill_(self.start)
        for one in self.workspaces:
            one.fill_(float("nan"))

    def begin(self, rank: int) -> int:
        """Waits for the end of the peers' previous calls; returns the epoch of this call."""
        flags = self.case.world_size * self.case.chunks
        before = self.epochs[rank].clone()
        while not torch.equal(self.pads[rank][flags:, 0], before.expand(self.case.world_size)):
            time.sleep(0.001)
        self.epochs[rank].add_(1)  # wraps around
        return int(self.epochs[rank])

    def end(self, rank: int) -> None:
        for pad in self.pads:
            pad[self.case.world_size * self.case.chunks + rank, 0] = self.epochs[rank][0]

    def arrivals(self, rank: int) -> Arrivals:
        case = self.case
        return Arrivals(
            rank, case.world_size, case.chunks, case.chunk_tile, self.pads[rank].data_ptr(),
            self.epochs[rank].data_ptr(), self.records[rank].data_ptr(), case.timeout,
        )  # fmt: skip

    def departures(self, rank: int) -> Departures:
        return Departures(
            rank, self.case.chunks,
            [workspace[rank].data_ptr() for workspace in self.workspaces],
            [pad.data_ptr() for pad in self.pads],
            self.counters[rank].data_ptr(), self.epochs[rank].data_ptr(),
        )  # fmt: skip

    def record(self, rank: int) -> dict[str, int]:
        return dict(zip(RECORD, self.records[rank].tolist(), strict=True))


def check_error(name: str, got: Tensor, want: Tensor, terms: int, roundings: int) -> list[str]:
    """Checks an error against the round-off of sums of `terms` products in fp32, and of
    `roundings` to the dtype.
    """
    limit = bound(torch.float32, max(terms, 1)) + roundings * torch.finfo(got.dtype).eps
    error = relative_error(got, want)
    return [] if error <= limit else [f"{name}: {error:.2e} > {limit:.2e}"]


# --- What arrives ---------------------------------------------------------------------------------


def shards_of(case: FusedCase, call: int) -> list[Tensor]:
    rows = draw(*case.gathered, dtype=DTYPES[case.dtype], device="cpu", seed=100 * call)
    return list(rows.chunk(case.world_size))


def other_of(case: FusedCase, rank: int, call: int) -> Tensor:
    is_a = case.arriving in ("rows", "inner_a")
    sizes = (case.k, case.n) if is_a else (case.m, case.k)
    other = draw(*sizes, dtype=DTYPES[case.dtype], device="cpu", seed=7000 + 100 * call + rank)
    return laid_out(other, case.layout[1 if is_a else 0])


def operands(case: FusedCase, rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, given the gathered rows and the other operand."""
    return {
        "rows": (rows, other),
        "columns": (other, rows.t()),
        "inner": (other, rows),
        "inner_a": (rows.t(), other),
    }[case.arriving]


def chunk_rows(case: FusedCase, flag: int) -> tuple[int, int]:
    """Rows of a chunk, by the definition in core/schedule/chunk_plan.h."""
    shard, chunk = divmod(flag, case.chunks)
    rows = case.gathered[0] // case.world_size
    tiles = -(-rows // case.chunk_tile)
    quotient, remainder = divmod(tiles, case.chunks)
    edges = [i * quotient + min(i, remainder) for i in (chunk, chunk + 1)]
    begin, end = (min(edge * case.chunk_tile, rows) for edge in edges)
    return shard * rows + begin, shard * rows + end


def run_gather(case: FusedCase) -> list[str]:
    """Ranks send and multiply in several calls, each after a random delay."""
    ranks = Ranks(case, *case.gathered)
    rows = case.gathered[0] // case.world_size

    def send(rank: int, shard: Tensor, epoch: int) -> None:
        """Sends the shard in chunks, to the own workspace first, like a copy engine."""
        for step in range(case.world_size):
            peer = (rank - step) % case.world_size
            for flag in range(rank * case.chunks, (rank + 1) * case.chunks):
                begin, end = chunk_rows(case, flag)
                ranks.workspaces[peer][begin:end] = shard[begin - rank * rows : end - rank * rows]
                ranks.pads[peer][flag, 0] = epoch

    def on_rank(rank: int) -> list[str]:
        failures = []
        for call in range(case.calls):
            dawdle(case.seed + 10 * call + rank)
            shards = shards_of(case, call)
            epoch = ranks.begin(rank)
            send(rank, shards[rank], epoch)
            failures += multiply(case, ranks, rank, call, torch.cat(shards))
            ranks.end(rank)
        return failures

    return [text for found in run_ranks(case.world_size, on_rank) for text in found]


def multiply(case: FusedCase, ranks: Ranks, rank: int, call: int, rows: Tensor) -> list[str]:
    """Runs the kernel, and returns the failures of its result."""
    other = other_of(case, rank, call)
    a, b = operands(case, ranks.workspaces[rank], other)
    out = torch.full((case.m, case.n), float("nan"), dtype=a.dtype)
    gather(
        a, b, out, case.arriving, ranks.arrivals(rank), max_programs=case.programs,
        config=case.config,
    )  # fmt: skip
    if ranks.record(rank)["state"]:
        return [f"{case} rank {rank} call {call}: {ranks.record(rank)}"]
    x, y = operands(case, rows.double(), other.double())
    return check_error(f"{case} rank {rank} call {call}", out, x @ y, case.k, 1)


def gather_in_order(case: FusedCase, order: list[int]) -> list[str]:
    """Runs rank 1's kernel while rank 0 delivers all chunks in the given order, with pauses.

    Rows that have not arrived are NaN, which reveals a tile that does not wait for them.
    """
    ranks = Ranks(case, *case.gathered)
    rows = torch.cat(shards_of(case, 0))

    def on_rank(rank: int) -> list[str]:
        if rank == 0:  # acts as a copy engine
            for flag in order:
                time.sleep(case.pause_s)
                begin, end = chunk_rows(case, flag)
                ranks.workspaces[1][begin:end] = rows[begin:end]
                ranks.pads[1][flag, 0] = case.first_epoch + 1
            return []
        ranks.begin(1)
        return multiply(case, ranks, 1, 0, rows)

    return [text for found in run_ranks(2, on_rank) for text in found]


def gather_orders(case: FusedCase) -> list[str]:
    """Raises flags forwards, backwards (the first to arrive is needed last), and shuffled."""
    flags = list(range(case.world_size * case.chunks))
    orders = [flags, flags[::-1], random.Random(case.seed).sample(flags, len(flags))]
    return [text for order in orders for text in gather_in_order(case, order)]


def gather_without_a_peer(case: FusedCase) -> dict[str, int]:
    """The record of rank 0 if rank 1 sends only its first chunk."""
    ranks = Ranks(case, *case.gathered)
    epoch = ranks.begin(0)
    for flag in range(case.chunks + 1):
        begin, end = chunk_rows(case, flag)
        ranks.workspaces[0][begin:end] = 1
        ranks.pads[0][flag, 0] = epoch
    multiply(case, ranks, 0, 0, torch.cat(shards_of(case, 0)))
    return ranks.record(0)


def gather_by_op(case: FusedCase) -> list[str]:
    """One rank's gather through the op that C++ calls, after everything has arrived."""
    ranks = Ranks(case, *case.gathered)
    epoch, rows, other = ranks.begin(0), torch.cat(shards_of(case, 0)), other_of(case, 0, 0)
    ranks.workspaces[0].copy_(rows)
    ranks.pads[0][: case.chunks, 0] = epoch
    out = torch.empty(case.m, case.n, dtype=rows.dtype)
    torch.ops.axonn._fused_gather_triton(
        *operands(case, ranks.workspaces[0], other), out, case.arriving,
        *astuple(ranks.arrivals(0)), case.programs,
    )  # fmt: skip
    x, y = operands(case, rows.double(), other.double())
    return check_error(f"{case} by its op", out, x @ y, case.k, 1)


# --- What leaves ----------------------------------------------------------------------------------


def addend_of(case: FusedCase, rank: int, call: int) -> tuple[Tensor, Tensor]:
    dtype, seed = DTYPES[case.dtype], 100 * call + rank
    a = draw(case.m, case.k, dtype=dtype, device="cpu", seed=seed)
    b = draw(case.k, case.n, dtype=dtype, device="cpu", seed=7000 + seed)
    return laid_out(a, case.layout[0]), laid_out(b, case.layout[1])


def run_scatter(case: FusedCase) -> list[str]:
    """Ranks multiply and send; each copies a chunk of a slot as soon as its flag is raised."""
    world, rows = case.world_size, case.m // case.world_size
    ranks = Ranks(case, world, rows, case.n)
    by_tiles = replace(case, chunk_tile=case.config.block_m if case.config else 1)

    def receive(rank: int, epoch: int) -> Tensor:
        """The slots of this rank; each chunk is copied as soon as its flag is raised."""
        got = torch.empty(world, rows, case.n, dtype=DTYPES[case.dtype])
        missing = list(range(world * case.chunks))
        while missing:
            for flag in [flag for flag in missing if int(ranks.pads[rank][flag, 0]) == epoch]:
                source = flag // case.chunks
                begin, end = (
                    row - source * rows
                    for row in chunk_rows(replace(by_tiles, arriving="rows"), flag)
                )
                got[source, begin:end] = ranks.workspaces[rank][source, begin:end]
                missing.remove(flag)
        return got

    def on_rank(rank: int) -> list[str]:
        failures = []
        share = slice(rank * rows, (rank + 1) * rows)
        for call in range(case.calls):
            dawdle(case.seed + 10 * call + rank)
            epoch = ranks.begin(rank)
            a, b = addend_of(case, rank, call)
            scatter(a, b, ranks.departures(rank), max_programs=case.programs, config=case.config)
            slots = receive(rank, epoch)
            for source, slot in enumerate(slots):
                x, y = addend_of(case, source, call)
                name = f"{case} call {call}: what rank {rank} gets from rank {source}"
                want = x.double()[share] @ y.double()
                failures += check_error(name, slot, want, case.k, 1)
            if ranks.counters[rank].any():
                failures.append(f"{case}: counters {ranks.counters[rank].tolist()} are left")
            ranks.end(rank)
        return failures

    return [text for found in run_ranks(world, on_rank) for text in found]


def scatter_by_op(case: FusedCase) -> list[str]:
    """One rank's product, sent to itself through the op that C++ calls."""
    ranks = Ranks(case, 1, case.m, case.n)
    epoch, (a, b) = ranks.begin(0), addend_of(case, 0, 0)
    torch.ops.axonn._fused_scatter_triton(a, b, *astuple(ranks.departures(0)), case.programs)
    flags = ranks.pads[0][: case.chunks, 0].tolist()
    failures = [] if flags == [epoch] * case.chunks else [f"flags {flags}, expected {epoch}"]
    want = a.double() @ b.double()
    return failures + check_error(f"{case} by its op", ranks.workspaces[0][0], want, case.k, 1)
