"""What a run has measured, as rows that are printed, drawn and written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """What training takes at its peak, on the rank where that is most, beyond the process before.

    peak_bytes: resident memory. shared_bytes: how much of it is symmetric memory that the rank has
    read or written, its peers' included: a page that two ranks use counts on both.
    """

    peak_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Row:
    """One system on one number of ranks. A system with a `problem` has no time.

    loss_error, norm_error: relative, of the first steps, to `single`; None for what is no number.
    spread_ms: the interquartile range of the rounds. ratio_to_single: tokens/s over those of
    `single` in the same run. memory: None where it was not measured.
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
    dtype: str = "fp32"  # of matrix products


def rows_to_values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [dataclasses.asdict(row) for row in rows]


def rows_from_values(values: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The reverse."""
    rows = []
    for row in values:
        memory = row["memory"]
        rows.append(Row(**{**row, "memory": MemoryUse(**memory) if memory else None}))
    return rows
