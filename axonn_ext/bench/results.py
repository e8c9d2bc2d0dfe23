"""The results of a benchmark: rows, the ratios of their times, their JSON, and their summary."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_ext.bench import symm_mem
from axonn_ext.spec.grid import GridShape

Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One algorithm on one op, shape and grid.

    Times are those of one call on the slowest rank, in microseconds. t is median_us. None means
    that a number was not measured or is not defined.

    op                  the op, as in the command
    grid                the sizes of the five axes
    shape               the global sizes
    dtype               the dtype of inputs and results; sums are accumulated in fp32 (for fp64, in
                        fp64)
    options             role and layout, where the op has them
    algorithm           how it was computed
    correct             whether all results were correct; if not, there is no time
    median_us           median over the batches
    min_us              the fastest batch
    iqr_us              "spread": width of the middle half of the batches
    floor_us            compute without communication, t_floor; the same in all rows of a table
    floor_iqr_us        the spread of the floor
    collective_us       collectives without compute, t_collective; None if nothing is sent
    collective_iqr_us   the spread of the collectives
    speedup             t_sequential / t: the speed relative to product and collective without this
                        library
    ratio_to_floor      "x floor": t / t_floor. At 1.00, communication is free
    hidden_share        "hidden": (t_sequential - t) / (t_sequential - t_floor): the saved share of
                        the time of "sequential" above the floor. At 1, all of it; below 0, t is
                        slower than "sequential"; above 1, t is faster than the floor
    overlap_efficiency  "overlap": (t_floor + t_collective - t) / min(t_floor, t_collective). At 1,
                        the shorter of both vanishes behind the longer one, as with perfect overlap
                        of these two; above 1, communication is also cheaper than c10d's
    rel_error           the error of the worst output on the worst rank; None for NaN, infinity or
                        another shape
    error_limit         the error that rounding explains
    worst_output        the worst output: y, dx, or the gradient of the named parameter
    batches             the number of batches that the median is taken of
    calls_per_batch     the number of calls in the last batch
    threads             the threads of each rank
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


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows in groups of one op, grid and shape, which were measured together."""
    return [list(group) for _, group in itertools.groupby(rows, key=title)]


def title(row: Row) -> str:
    """Returns a title that says what the group of the row measured."""
    names, sizes = ",".join(row.shape), ",".join(str(size) for size in row.shape.values())
    options = "".join(f", {value}" for value in row.options.values())
    return f"{row.op}  {GridShape(**row.grid).short()}  {names} = {sizes}  {row.dtype}{options}"


def content_of(machine: Json, rows: Sequence[Any], summary: Sequence[Any] | None = None) -> Json:
    """Returns the content of the --json file. rows, summary: dataclasses."""
    content: Json = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
    if summary is not None:
        content["summary"] = [dataclasses.asdict(line) for line in summary]
    return content


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of such a file."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


# --- "auto" and the alternatives of a user -------------------------------------------------------


CHOSEN = "auto"
REFERENCES = ("sequential", symm_mem.NAME)
TOLERANCE = 0.02  # "auto" may be slower by this share, from noise and its own look-up
MAX_NAMED = 5


@dataclass(frozen=True)
class Comparison:
    """ "auto" and another algorithm, compared in all cases, a grid and a shape, that both ran.

    op, against   the op, and the algorithm with which "auto" is compared
    num_cases     the number of grids and shapes where both have a time
    worst_ratio   the largest t_auto / t_other
    worst_case    the grid and shape with this ratio
    worst_spread  the larger of both spreads there, each over its median
    mean_speedup  the geometric mean of t_other / t_auto
    tolerance     by how much longer "auto" may take, as a share
    slower        the cases above 1 + tolerance
    """

    op: str
    against: str
    num_cases: int
    worst_ratio: float
    worst_case: str
    worst_spread: float
    mean_speedup: float
    tolerance: float
    slower: tuple[str, ...]

    def sentence(self) -> str:
        cases = f"{self.num_cases} case{'s' if self.num_cases > 1 else ''}"
        text = (
            f"{self.op}: auto takes at most {self.worst_ratio:.3f} times as long as {self.against} "
            f"({self.worst_case}; spread {self.worst_spread:.1%}); geometric mean of its speedups "
            f"over {cases}: {self.mean_speedup:.3f}"
        )
        if not self.slower:
            return f"{text}; never slower by more than {self.tolerance:.0%}"
        named = "; ".join(self.slower[:MAX_NAMED])
        more = "; ..." if len(self.slower) > MAX_NAMED else ""
        return (
            f"{text}; slower by more than {self.tolerance:.0%} in {len(self.slower)}: {named}{more}"
        )


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Returns a comparison for each op and each reference that was timed along with "auto"."""
    return [
        comparison
        for op in dict.fromkeys(row.op for row in rows)
        for against in REFERENCES
        if (comparison := _compare([row for row in rows if row.op == op], against)) is not None
    ]


def _compare(rows: Sequence[Row], against: str) -> Comparison | None:
    found: list[tuple[float, float, str]] = []  # (ratio, spread, case)
    for group in grouped(rows):
        timed = {row.algorithm: row for row in group if row.median_us is not None}
        if CHOSEN in timed and against in timed:
            pair = timed[CHOSEN], timed[against]
            ours, theirs = (row.median_us or 0.0 for row in pair)
            spread = max((row.iqr_us or 0.0) / (row.median_us or 1.0) for row in pair)
            found.append((ours / theirs, spread, _case(group[0])))
    if not found:
        return None
    ratio, spread, case = max(found)
    return Comparison(
        op=rows[0].op,
        against=against,
        num_cases=len(found),
        worst_ratio=ratio,
        worst_case=case,
        worst_spread=spread,
        mean_speedup=1 / statistics.geometric_mean([ratio for ratio, _, _ in found]),
        tolerance=TOLERANCE,
        slower=tuple(case for ratio, _, case in found if ratio > 1 + TOLERANCE),
    )


def _case(row: Row) -> str:
    names, sizes = ",".join(row.shape), ",".join(map(str, row.shape.values()))
    return f"{names} = {sizes} on {GridShape(**row.grid).short()}"
