"""Measures how much of a copy over a link hides behind a matmul, on one GPU.

The link is emulated: the peers' shards are in pinned host memory, from which the copy engine reads
them over the host's bus while the GPU multiplies. So the link is real, but it is not NVLink, and
there is no collective: this shows how much the schedules of "chunked" and "fused" hide, not how
fast NCCL is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from axonn_ext.bench.benchmark import add_json
from axonn_ext.bench.results import content_of
from axonn_ext.calibrate.measure import HEAD_START_CYCLES, Timing
from axonn_ext.calibrate.shapes import is_size
from axonn_ext.calibrate.this_machine import describe_machine
from axonn_ext.kernels import extension
from axonn_ext.terminal.arguments import new_parser, whole
from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.rows import Column, RowsFile, RowsTable

LINK = "emulated: pinned host memory over the host's bus, by the copy engine"
NUM_SHARDS = 4  # one of them is the GPU's own
# "fused" cuts a shard like chunks_per_shard of csrc/core/cuda/fused/fused_calls.h.
FUSED_CHUNK_ROWS, MAX_FUSED_CHUNKS = 256, 4
CALLS = 20
WARM_UP_CALLS = 5
MAX_DIFFERENCE = 2 * torch.finfo(torch.bfloat16).eps
LEAST_OVERLAP = 0.9  # the overlap efficiency that "fused" aims for
COLUMNS = (
    Column("M,N,K", 17, is_number=True),
    Column("algorithm"),
    *(
        Column(title, is_number=True)
        for title in (
            "chunks", "gemm us", "copy us", "in turn us", "overlapped us", "link GB/s", "overlap"
        )
    ),
)  # fmt: skip
DESCRIPTION = """\
Runs on one GPU. A [M, K], in bf16, is gathered from four shards, one on the GPU and three in pinned
host memory, while it is multiplied by B [K, N]: by "chunked", which copies and multiplies in
chunks, and by "fused", one kernel that waits for each chunk (GPUs of sm_90). In turns with these:
the copy alone, the matmul alone, and one after the other. The link is emulated: host memory, not
NVLink. The larger N, the shorter the copy is relative to the matmul. The last lines compare fused,
for each shape, with the best chunked and with one after the other."""
EPILOG = """\
examples:
  axonn-ext bench link-overlap
  axonn-ext bench link-overlap --shape 8192,38912,4096 8192,21248,4096 8192,10624,4096
      over 50 GB/s the copies take about 0.25, 0.46 and 0.92 of the matmul's time
"""


@dataclass(frozen=True)
class LinkRow:
    """The times of one gather and matmul, as medians in microseconds; None if not defined.

    overlap_efficiency: (gemm + copy - overlapped) / min(gemm, copy).
    """

    op: str
    link: str
    shape: dict[str, int]
    dtype: str
    algorithm: str
    chunks: int  # of all shards that are copied, together
    gemm_us: float
    copy_us: float
    sequential_us: float
    overlapped_us: float
    link_gbps: float
    overlap_efficiency: float
    max_difference: float  # relative, between the overlapped result and that of the whole matmul

    def cells(self) -> tuple[str, ...]:
        """Returns the row's cells below COLUMNS."""
        times = (self.gemm_us, self.copy_us, self.sequential_us, self.overlapped_us)
        return (
            ",".join(map(str, self.shape.values())),
            self.algorithm,
            str(self.chunks),
            *(f"{us:,.0f}" for us in times),
            f"{self.link_gbps:.1f}",
            f"{self.overlap_efficiency:.0%}",
        )


@dataclass(frozen=True)
class LinkSummary:
    """ "fused" and "chunked" on one shape; "chunked" has its best number of chunks."""

    shape: dict[str, int]
    copy_over_gemm: float
    overlap_efficiency: float
    speedup_over_chunked: float
    speedup_over_sequential: float

    def sentence(self) -> str:
        return (
            f"{','.join(map(str, self.shape.values()))}, copy / matmul {self.copy_over_gemm:.2f}: "
            f"fused overlaps {self.overlap_efficiency:.1%} (aim: {LEAST_OVERLAP:.0%}), "
            f"{self.speedup_over_chunked:.3f} x as fast as chunked, "
            f"{self.speedup_over_sequential:.3f} x as one after the other"
        )


def summarize(rows: Sequence[LinkRow]) -> list[LinkSummary]:
    """Returns a summary for each shape for which "fused" was timed."""
    return [
        LinkSummary(
            shape=row.shape,
            copy_over_gemm=row.copy_us / row.gemm_us,
            overlap_efficiency=row.overlap_efficiency,
            speedup_over_chunked=min(
                other.overlapped_us
                for other in rows
                if other.algorithm == "chunked" and other.shape == row.shape
            )
            / row.overlapped_us,
            speedup_over_sequential=row.sequential_us / row.overlapped_us,
        )
        for row in rows
        if row.algorithm == "fused"
    ]


def time_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median time of each call on the current stream; calls run in turns."""
    return {name: timing.median_us for name, timing in time_calls(calls).items()}


def time_calls(calls: Mapping[str, Callable[[], object]]) -> dict[str, Timing[None]]:
    """Returns the times of each call on the current stream; calls run in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-WARM_UP_CALLS, CALLS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)  # the host enqueues the call in this time
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 0:
                samples[name].append(begin.elapsed_time(end) * 1e3)
    return {name: Timing(tuple(values), 1, None) for name, values in samples.items()}


def measure_link(m: int, n: int, k: int, chunks: Sequence[int]) -> list[LinkRow]:
    """Times a gather before a matmul: "chunked" for each number of chunks, and "fused".

    It needs a GPU; "fused" is left out if it has no kernel for the GPU. M is a multiple of four.
    """
    generator = torch.Generator().manual_seed(0)
    host = torch.randn(m, k, generator=generator).to(torch.bfloat16).pin_memory()
    b = torch.randn(n, k, generator=generator).to("cuda", torch.bfloat16).t()
    a = host.cuda()
    gathered, y = torch.empty_like(a), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    own = m // NUM_SHARDS
    fused_chunks = min(max(own // FUSED_CHUNK_ROWS, 1), MAX_FUSED_CHUNKS)
    gathered[:own] = a[:own]
    whole = torch.mm(a, b)

    def copy() -> None:
        gathered[own:].copy_(host[own:], non_blocking=True)

    def sequential() -> None:
        copy()
        torch.mm(gathered, b, out=y)

    calls: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.mm(a, b, out=whole), "copy": copy, "sequential": sequential,
    }  # fmt: skip
    results = {}
    for number in chunks:
        calls[f"chunked {number}"] = _chunked(host, gathered, b, y, number)
        gathered[own:].zero_()
        calls[f"chunked {number}"]()
        results[f"chunked {number}"] = _difference(y, whole)
    if (fused := _fused(host, a, b)) is not None:
        calls["fused"] = fused
        results["fused"] = _difference(fused(), whole)
    us = time_us(calls)
    # The values change after the timed calls, so that a missing wait shows in the result.
    host.neg_()
    gathered[:own].neg_()
    a.neg_()
    for name in results:
        got = calls[name]()
        results[name] = max(
            results[name], _difference(got if isinstance(got, Tensor) else y, -whole)
        )
    return [
        LinkRow(
            op="link-overlap",
            link=LINK,
            shape={"M": m, "N": n, "K": k},
            dtype="bf16",
            algorithm=name.split()[0],
            chunks=int(name.split()[1]) if " " in name else fused_chunks * (NUM_SHARDS - 1),
            gemm_us=us["gemm"],
            copy_us=us["copy"],
            sequential_us=us["sequential"],
            overlapped_us=us[name],
            link_gbps=host[own:].nbytes / us["copy"] / 1e3,
            overlap_efficiency=(us["gemm"] + us["copy"] - us[name]) / min(us["gemm"], us["copy"]),
            max_difference=difference,
        )
        for name, difference in results.items()
    ]


def _difference(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max()).item())


def _chunked(
    host: Tensor, gathered: Tensor, b: Tensor, y: Tensor, chunks: int
) -> Callable[[], None]:
    """Returns a call that multiplies its own rows first, then each other chunk when it arrives."""
    own = len(host) // NUM_SHARDS
    link = torch.cuda.Stream()
    places = list(zip(*(part[own:].chunk(chunks) for part in (host, gathered, y)), strict=True))
    arrived = [torch.cuda.Event() for _ in places]

    def call() -> None:
        main = torch.cuda.current_stream()
        link.wait_stream(main)  # until then, `main` may still read `gathered`
        for (source, target, _), event in zip(places, arrived, strict=True):
            with torch.cuda.stream(link):
                target.copy_(source, non_blocking=True)
                event.record(link)
        torch.mm(gathered[:own], b, out=y[:own])
        for (_, target, out), event in zip(places, arrived, strict=True):
            event.wait(main)
            torch.mm(target, b, out=out)

    return call


def _fused(host: Tensor, a: Tensor, b: Tensor) -> Callable[[], Tensor] | None:
    """Returns a call of one kernel that waits for each chunk; None if there is none for the GPU."""
    cuda = extension.cuda if extension.cuda_sm90 is not None else None
    if cuda is None or torch.cuda.get_device_capability() != (9, 0):
        return None
    link = cuda.EmulatedLink(NUM_SHARDS, workspace_bytes=a.nbytes)
    shards = [a.chunk(NUM_SHARDS)[0], *host.chunk(NUM_SHARDS)[1:]]
    return lambda: link.all_gather_matmul(shards, b)


def parse_sizes(option: str, text: str) -> tuple[int, int, int]:
    """Returns M, N, K of an option's value."""
    sizes = text.split(",")
    if len(sizes) != 3 or not all(is_size(size) and int(size) > 0 for size in sizes):
        raise UserError(f"{option}: expected M,N,K, three whole numbers >= 1, got {text!r}")
    m, n, k = (int(size) for size in sizes)
    return m, n, k


class KernelRow(Protocol):
    """A row of a benchmark of kernels: a dataclass."""

    @property
    def max_difference(self) -> float:
        """The difference from torch's result, relative to its largest element."""

    def cells(self) -> tuple[str, ...]:
        """Returns the row's cells of the table."""


class Sentence(Protocol):
    """A line of a summary: a dataclass."""

    def sentence(self) -> str: ...


K = TypeVar("K", bound=KernelRow)


def show_rows(
    path: Path | None, columns: Sequence[Column], groups: Iterable[Sequence[K]],
    summarize: Callable[[Sequence[K]], Sequence[Sentence]],
) -> int:  # fmt: skip
    """Shows rows and writes them to --json as they come, then their summary.

    Returns the command's status: 1 if a result is wrong. A matmul may add in a different order than
    torch's, or than the whole one, so results may differ by two roundings.
    """
    machine = describe_machine(threads=torch.get_num_threads(), device="cuda")
    table, rows = RowsTable(Console(), columns), list[K]()
    with RowsFile("--json", path) as file:
        for group in groups:
            for row in group:
                table.add(row.cells())
            rows += group
            file.write(content_of(machine, rows, summarize(rows)))
    for line in summarize(rows):
        print(line.sentence())
    return 0 if max(row.max_difference for row in rows) <= MAX_DIFFERENCE else 1


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        benchmarks, "link-overlap", run, description=DESCRIPTION, epilog=EPILOG,
        help="how much of a copy over an emulated link hides behind a matmul, on one GPU",
    )  # fmt: skip
    add = parser.add_argument
    add("--shape", nargs="+", default=["8192,8192,8192"], metavar="M,N,K",
        help=f"sizes of the products; {NUM_SHARDS} must divide M (default: "
        "8192,8192,8192)")  # fmt: skip
    add("--chunks", type=whole(), nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="numbers of chunks per copied operand, for chunked (default: 1 2 4 8)")  # fmt: skip
    add_json(parser, ", updated after each shape")


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises UserError for a mistake by the user."""
    shapes = list(dict.fromkeys(parse_sizes("--shape", text) for text in args.shape))
    for m, _, _ in shapes:
        if m % NUM_SHARDS:
            raise UserError(f"--shape: expected an M that {NUM_SHARDS} shards divide, got {m}")
        if not all(1 <= chunks <= m for chunks in args.chunks):
            raise UserError(f"--chunks: expected numbers from 1 to M={m}, got {args.chunks}")
    check_writable("--json", args.json)
    if not torch.cuda.is_available():
        raise UserError("link-overlap needs a GPU: torch sees no GPU here")
    print(f"bf16; link {LINK}")
    groups = (measure_link(*shape, args.chunks) for shape in shapes)
    return show_rows(args.json, COLUMNS, groups, summarize)
