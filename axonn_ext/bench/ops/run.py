"""Checks and times the ways of one op. A wrong one gets no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from axonn_ext.bench.ops.cases import TORCH, OpCase, Way
from axonn_ext.calibrate.measure import Timing, measure, ranks_of, synchronize_with

COPY = "copy"


@dataclass(frozen=True)
class OpRow:
    """One way to compute an op.

    problem                    what is wrong; "" if it is right. A wrong one has no time
    median_us, iqr_us, min_us  the time of a call, in microseconds
    moved_bytes                what a call must at least read and write
    copy_gbps                  what a copy reads and writes over its median time, in turns with the
                               calls
    floor_us                   the time to move moved_bytes as fast
    ratio_to_floor             median_us / floor_us
    speedup                    the median of torch's way over this one's
    """

    op: str
    device: str
    dtype: str
    shape: dict[str, int]
    system: str
    problem: str
    median_us: float | None
    iqr_us: float | None
    min_us: float | None
    moved_bytes: int
    copy_gbps: float
    floor_us: float
    ratio_to_floor: float | None
    speedup: float | None
    rounds: int
    threads: int


def run_case(
    case: OpCase, *, device: str, copied_bytes: int, rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[OpRow]:  # fmt: skip
    """Returns a row for each way of the case. copied_bytes: those that the copy reads."""
    problems = {name: way.problem() for name, way in case.ways.items()}
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(source),
        **{name: way.call for name, way in case.ways.items() if not problems[name]},
    }
    timings = measure(
        calls,
        ranks_of(device),
        rounds=rounds,
        on_round=on_round,
        synchronize=synchronize_with(device),
    )
    copy_gbps = 2 * copied_bytes / timings[COPY].median_us / 1e3
    return [
        row_of(
            case, name, way, timings, problem=problems[name], device=device, copy_gbps=copy_gbps,
            rounds=rounds,
        )
        for name, way in case.ways.items()
    ]  # fmt: skip


def row_of(
    case: OpCase, name: str, way: Way, timings: dict[str, Timing[object]], *, problem: str,
    device: str, copy_gbps: float, rounds: int,
) -> OpRow:  # fmt: skip
    """Returns the row of a way from the times of all ways that are right."""
    timing, torchs = timings.get(name), timings.get(TORCH)
    floor_us = way.moved_bytes / copy_gbps / 1e3
    return OpRow(
        op=case.op,
        device=device,
        dtype=case.dtype,
        shape=case.shape,
        system=name,
        problem=problem,
        median_us=timing.median_us if timing else None,
        iqr_us=timing.iqr_us if timing else None,
        min_us=timing.min_us if timing else None,
        moved_bytes=way.moved_bytes,
        copy_gbps=copy_gbps,
        floor_us=floor_us,
        ratio_to_floor=timing.median_us / floor_us if timing else None,
        speedup=torchs.median_us / timing.median_us if timing and torchs else None,
        rounds=rounds,
        threads=torch.get_num_threads(),
    )
