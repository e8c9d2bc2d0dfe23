"""The results of a run, as rows that are printed, drawn and written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """The peak memory of training on the rank where it is largest, without that before training.

    peak_bytes: resident memory; on GPUs what torch has allocated. shared_bytes: the part of it that
    is symmetric memory which the rank has read or written, including its peers'. A page that two
    ranks use counts on both. On GPUs it is 0, as torch's allocator does not have that memory.
    """

    peak_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Row:
    """One system on one number of ranks. A system with a `problem` has no time.

    loss_error, norm_error: the relative errors of the first steps, compared with `single`; None for
    values that are not numbers. spread_ms: the interquartile range of the rounds. ratio_to_single:
    tokens/s over those of `single` in the same run. memory: None if it was not measured. tflops:
    model flops of all ranks per second, in 10**12, with half of attention, which is causal.
    peak_fraction: these over the peak of the GPUs; None for CPUs and for GPUs without a known peak.
    """

    system: str
    kind: str
    grid: dict[str, int] | None
    num_ranks: int
    num_threads: int
    batch_size: int
    loss_error: float | None
    norm_error: float | None
    problem: str | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    spread_ms: float | None = None
    rounds: int | None = None
    tokens_per_s: float | None = None
    ratio_to_single: float | None = None
    memory: MemoryUse | None = None
    dtype: str = "fp32"  # the dtype of matrix products
    device: str = "cpu"
    tflops: float | None = None
    peak_fraction: float | None = None


def rows_to_values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows as plain values."""
    return [dataclasses.asdict(row) for row in rows]


def rows_from_values(values: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the rows that `rows_to_values` has turned into plain values."""
    rows = []
    for row in values:
        memory = row["memory"]
        rows.append(Row(**{**row, "memory": MemoryUse(**memory) if memory else None}))
    return rows
