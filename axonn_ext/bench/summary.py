"""Compares "auto" with the alternatives of a user, over everything that was timed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_ext.bench import symm_mem
from axonn_ext.bench.report import grouped
from axonn_ext.bench.results import Row
from axonn_ext.spec.grid import GridShape

CHOSEN = "auto"
REFERENCES = ("sequential", symm_mem.NAME)
TOLERANCE = 0.02  # "auto" may be slower by this share, by noise and its own look-up
MAX_NAMED = 5


@dataclass(frozen=True)
class Comparison:
    """ "auto" and another algorithm, compared in all cases, a grid and a shape, that both ran.

    worst_ratio      the largest t_auto / t_other
    worst_case       the case with this ratio
    worst_spread     the larger of both middle halves over its median, in that case
    mean_speedup     the geometric mean of t_other / t_auto
    slower           the cases in which "auto" takes longer by more than `tolerance`
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
            f"{self.op}: auto takes at most {self.worst_ratio:.3f} x the time of {self.against} "
            f"({self.worst_case}; spread {self.worst_spread:.1%}), and is "
            f"{self.mean_speedup:.3f} x as fast in the geometric mean of {cases}"
        )
        if not self.slower:
            return f"{text}; never slower by more than {self.tolerance:.0%}"
        named = "; ".join(self.slower[:MAX_NAMED])
        more = "; ..." if len(self.slower) > MAX_NAMED else ""
        return (
            f"{text}; slower by more than {self.tolerance:.0%} in {len(self.slower)}: {named}{more}"
        )


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Returns a comparison for each op and each reference that was timed beside "auto"."""
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
