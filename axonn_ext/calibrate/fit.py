"""Bandwidth and latency, from how long messages of several sizes take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A message: bytes that a rank sends, seconds it took (median), and the width of the middle
    half of the times."""

    num_bytes: int
    seconds: float
    spread_s: float


class Line(NamedTuple):
    """seconds = latency_s + bytes / bytes_per_s; error: the largest relative one of a point."""

    bytes_per_s: float
    latency_s: float
    error: float


def fit(points: Sequence[Point]) -> Line:
    """Bandwidth from the large messages, latency from the smallest.

    Bandwidth: the weighted median of the slopes between all but the smallest, so that one time that
    is off does not move it far (Theil, Sen; a slope weighs as much as its points lie apart, for
    noise is the same at all sizes); where times do not grow, the largest message alone tells.

    Raises ValueError for fewer than three sizes, or times that are not positive.
    """
    smallest, *larger = sorted(points)
    sizes = {p.num_bytes for p in points}
    if len(sizes) < max(3, len(points)) or any(p.seconds <= 0 for p in points):
        raise ValueError(f"fit: expected positive times of at least three sizes, got {points}")
    slope = _weighted_median(
        [
            ((b.seconds - a.seconds) / (b.num_bytes - a.num_bytes), b.num_bytes - a.num_bytes)
            for a, b in itertools.combinations(larger, 2)
        ]
    )
    if slope <= 0:
        slope = larger[-1].seconds / larger[-1].num_bytes
    latency = max(0.0, smallest.seconds - slope * smallest.num_bytes)
    error = max(abs(latency + slope * p.num_bytes - p.seconds) / p.seconds for p in points)
    return Line(1 / slope, latency, error)


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Of (value, weight): the value at which half of the weight is reached."""
    half = sum(weight for _, weight in values) / 2
    reached = 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("weights are positive")


def ring_steps(kind: str, group_size: int) -> int:
    """Messages of a rank that follow each other."""
    return (group_size - 1) * (2 if kind == "all_reduce" else 1)
