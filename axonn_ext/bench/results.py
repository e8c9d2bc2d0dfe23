"""The results of a benchmark: rows, the ratios of their times, and their JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_ext.terminal.files import write_text

Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One algorithm on one op, shape and grid.

    Times are those of one call on the slowest rank, in microseconds. None means that a number was
    not measured or is not defined.

    median_us, min_us, iqr_us    over the batches; None if the result was wrong
    floor_us                     median of computation alone
    collective_us                median of the collectives alone; None if nothing is sent
    speedup                      t_sequential / t
    ratio_to_floor               t / t_floor
    hidden_share                 (t_sequential - t) / (t_sequential - t_floor)
    overlap_efficiency           (t_floor + t_collective - t) / min(t_floor, t_collective)
    rel_error, error_limit       the error of the worst output on the worst rank, and the error that
                                 rounding explains; rel_error is None for NaN, infinity or another
                                 shape
    """

    op: str
    grid: dict[str, int]
    shape: dict[str, int]
    dtype: str
    options: dict[str, str]
    algorithm: str
    correct: bool
    median_us: float | None
    min_us: float | None
    iqr_us: float | None
    floor_us: float
    floor_iqr_us: float
    collective_us: float | None
    collective_iqr_us: float | None
    speedup: float | None
    ratio_to_floor: float | None
    hidden_share: float | None
    overlap_efficiency: float | None
    rel_error: float | None
    error_limit: float
    worst_output: str
    batches: int
    calls_per_batch: int | None
    threads: int


@dataclass(frozen=True)
class Ratios:
    """The ratios of a time to those of its parts, where they are defined."""

    speedup: float | None
    ratio_to_floor: float | None
    hidden_share: float | None
    overlap_efficiency: float | None

    @classmethod
    def of(
        cls, t: float | None, *, sequential: float | None, floor: float, collective: float | None
    ) -> Ratios:
        if t is None:
            return cls(None, None, None, None)
        return cls(
            speedup=None if sequential is None else _over(sequential, t),
            ratio_to_floor=_over(t, floor),
            hidden_share=None if sequential is None else _over(sequential - t, sequential - floor),
            overlap_efficiency=None
            if collective is None
            else _over(floor + collective - t, min(floor, collective)),
        )


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def write_json(
    path: Path, machine: Json, rows: Sequence[Any], summary: Sequence[Any] | None = None
) -> None:
    """Writes the file that the documents describe. rows, summary: dataclasses."""
    content = content_of(machine, rows, summary)
    write_text("--json", path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def content_of(machine: Json, rows: Sequence[Any], summary: Sequence[Any] | None = None) -> Json:
    """Returns what that file holds."""
    content: Json = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
    if summary is not None:
        content["summary"] = [dataclasses.asdict(line) for line in summary]
    return content


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file that `write_json` wrote."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]
