"""`axonn-ext bench ops`: times memory-bound ops against torch's and the speed of a copy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from axonn_ext.bench.benchmark import (
    Benchmark,
    SystemRow,
    check_memory,
    number,
    shared_fields,
    take_turns,
)
from axonn_ext.bench.ops_cases import CASES, TORCH, OpCase, Sizes
from axonn_ext.terminal.arguments import whole

COPY = "copy"
# Enough that a GPU's caches hold little of what a call moves, and that a CPU takes some seconds.
ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True, kw_only=True)
class OpRow(SystemRow):
    """One way to compute an op.

    moved_bytes  the bytes that a call must at least read and write
    copy_gbps    the bytes that a copy reads and writes over its median time, timed in turns with
                 the calls; the floor is the time to move moved_bytes at this rate
    speedup      the median of torch's way over this one's
    """

    shape: dict[str, int]
    moved_bytes: int
    copy_gbps: float
    speedup: float | None

    @property
    def name(self) -> str:
        return f"{self.op} of {self.system}"

    @property
    def gbps(self) -> float | None:
        return None if self.median_us is None else self.moved_bytes / self.median_us / 1e3


def run_case(
    case: OpCase, *, device: str, copied_bytes: int, rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[OpRow]:  # fmt: skip
    """Returns a row for each way of the case. A wrong one gets no time.

    copied_bytes: the bytes that the copy reads
    """
    problems = {name: way.problem() for name, way in case.ways.items()}
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(source),
        **{name: way.call for name, way in case.ways.items() if not problems[name]},
    }
    timings = take_turns(calls, device, rounds=rounds, on_round=on_round)
    copy_gbps = 2 * copied_bytes / timings[COPY].median_us / 1e3
    torchs, rows = timings.get(TORCH), []
    for name, way in case.ways.items():
        timing = timings.get(name)
        rows.append(OpRow(
            op=case.op, device=device, dtype=case.dtype, shape=case.shape, system=name,
            problem=problems[name],
            **shared_fields(timing, way.moved_bytes / copy_gbps / 1e3, rounds),
            moved_bytes=way.moved_bytes, copy_gbps=copy_gbps,
            speedup=torchs.median_us / timing.median_us if timing and torchs else None,
        ))  # fmt: skip
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="OP",
        help=f"ops to time (default: {' '.join(CASES)})")  # fmt: skip
    add("--elements", type=whole(), metavar="N",
        help="number of elements to sum or fill "
        f"(default: {ELEMENTS['cuda']} on GPUs, {ELEMENTS['cpu']} on CPUs)")  # fmt: skip
    add("--slots", type=whole(1, 256), default=8, metavar="N",
        help="number of slots to sum, one per rank of a reduction (default: "
        "%(default)s)")  # fmt: skip


def _sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(
        elements=args.elements or ELEMENTS[args.device], slots=args.slots, dtype=args.dtype,
        device=args.device,
    )  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    sizes = _sizes(args)
    of_an_element = 2 * 4 + 2 * sizes.width  # a copy of fp32 numbers; slots, and a sum of one slot
    check_memory(f"--elements {sizes.elements}", sizes.elements * of_an_element, args.device)


def _run(args: argparse.Namespace, on_round: Callable[[], None]) -> Iterator[list[OpRow]]:
    sizes = _sizes(args)
    for op in dict.fromkeys(args.op):
        yield run_case(
            CASES[op](sizes), device=args.device, copied_bytes=4 * sizes.elements,
            rounds=args.rounds, on_round=on_round,
        )  # fmt: skip


OPS: Benchmark[OpRow] = Benchmark(
    "ops", "memory-bound ops, against torch's and the speed of a copy",
    description="""\
Times memory-bound ops on one rank: sums of slots, as in fused reduce-scatters, and initial values
from Philox. Each takes turns with torch's counterpart and with a copy. The floor of an op is the
time of the bytes that it must move, at the speed of this copy. A wrong result gets no time, and the
exit status is 1. `bench loss` and `bench optimizer` time cross-entropy and AdamW.
docs/benchmarks.md explains the numbers.""",
    epilog="""\
examples:
  axonn-ext bench ops
  axonn-ext bench ops --op reduce --dtype fp32 --json ops.json
  axonn-ext bench ops --device cpu --threads 0 --elements 1e8
""",
    columns={
        "op": lambda row: row.op,
        "dtype": lambda row: row.dtype,
        "shape": lambda row: ",".join(f"{name}={size}" for name, size in row.shape.items()),
        "system": lambda row: row.system,
        "median us": lambda row: number(row.median_us, 1),
        "spread": lambda row: number(row.iqr_us, 1),
        "min": lambda row: number(row.min_us, 1),
        "GB/s": lambda row: number(row.gbps, 1),
        "copy GB/s": lambda row: number(row.copy_gbps, 1),
        "x floor": lambda row: number(row.ratio_to_floor),
        "vs torch": lambda row: number(row.speedup),
    },
    widths=(12, 0, 22, 9, 11, 9, 11, 7, 0, 0, 0), num_names=4,
    add_options=_add_options, check=_check, run=_run,
)  # fmt: skip
