"""Compares the predicted order of configurations with the measured one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TOP = 3
GOOD_ENOUGH = 0.05  # a configuration this close to the best time is as good as the best
MIN_CORRELATION = 0.8


class Times(NamedTuple):
    """The least and median times of a step over the rounds, and their interquartile range.

    The least time counts, because other programs can only add to a time.
    """

    fastest_s: float
    median_s: float
    spread_s: float


@dataclass(frozen=True)
class Row:
    """A configuration and its `Times`. schedule: that of Config."""

    grid: str
    layout: str
    schedule: str
    predicted_s: float
    fastest_s: float
    median_s: float
    spread_s: float


@dataclass(frozen=True)
class Verdict:
    """How well the orders agree.

    spearman: the rank correlation. gap: how much slower the best configuration of the planner's top
    is than the best of all.
    """

    spearman: float
    gap: float

    @property
    def useful(self) -> bool:
        return self.spearman >= MIN_CORRELATION and self.gap <= GOOD_ENOUGH


def judge(rows: Sequence[Row], *, top: int = TOP) -> Verdict:
    """Compares the orders. Raises ValueError unless there are more rows than `top`."""
    if len(rows) <= top:
        raise ValueError(f"judge: expected more than {top} rows, got {len(rows)}")
    first = sorted(rows, key=lambda row: row.predicted_s)[:top]
    measured = [row.fastest_s for row in rows]
    gap = min(row.fastest_s for row in first) / min(measured) - 1
    return Verdict(spearman([row.predicted_s for row in rows], measured), gap)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the correlation of the ranks; equal values get the mean of their ranks."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    less = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [count + (same - 1) / 2 for count, same in zip(less, equal, strict=True)]


def markdown(title: str, rows: Sequence[Row], verdict: Verdict) -> str:
    """Returns a table in the planner's order."""
    measured = sorted(row.fastest_s for row in rows)
    lines = [
        f"{title}: Spearman {verdict.spearman:.2f}; the best of the planner's first {TOP} is "
        f"{verdict.gap:.1%} slower than the best of all.",
        "",
        "| planner | measured | grid | layout | schedule | predicted ms | least ms | median ms "
        "| spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for place, row in enumerate(sorted(rows, key=lambda row: row.predicted_s), 1):
        lines.append(
            f"| {place} | {measured.index(row.fastest_s) + 1} | {row.grid} | {row.layout} "
            f"| {row.schedule} "
            f"| {row.predicted_s * 1e3:,.0f} | {row.fastest_s * 1e3:,.0f} "
            f"| {row.median_s * 1e3:,.0f} | {row.spread_s / row.median_s:.0%} |"
        )
    return "\n".join([*lines, ""])
