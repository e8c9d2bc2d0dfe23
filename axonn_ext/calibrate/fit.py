"""Computes bandwidth and latency from the times of messages of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """The bytes that a rank sends in a message, and the median and interquartile range of its
    times."""

    num_bytes: int
    seconds: float
    spread_s: float


class Line(NamedTuple):
    """The model seconds = latency_s + bytes / bytes_per_s; error: its largest relative error."""

    bytes_per_s: float
    latency_s: float
    error: float


def fit(points: Sequence[Point]) -> Line:
    """Returns the bandwidth of the large messages and the latency of the smallest one.

    The bandwidth follows from the median of the slopes between all messages but the smallest, so
    that a single outlier has little influence (Theil, Sen). A slope is weighted by the distance of
    its sizes, because noise is the same at all sizes. If times do not grow with size, the bandwidth
    is that of the largest message.

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
    """Returns, for pairs (value, weight), the value at which half of the weight is reached."""
    half = sum(weight for _, weight in values) / 2
    reached = 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("weights are positive")


def ring_steps(kind: str, group_size: int) -> int:
    """Returns the number of steps of a ring: messages that a rank sends one after another.

    kind "send", a message between two stages, is one step.
    """
    if kind == "send":
        return 1
    return (group_size - 1) * (2 if kind == "all_reduce" else 1)
