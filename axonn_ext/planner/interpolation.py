"""Values between measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, ...]


class LogField:
    """A positive factor, known at some points, that is 1 where a model is right.

    Between them: the mean of its logarithm, weighted by the inverse square of the distance, where
    coordinates are logarithms, too (Shepard 1968). Exact at the points; far away, their mean.
    """

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        logs: dict[Point, list[float]] = {}
        for coordinates, factor in rows:
            logs.setdefault(_log(coordinates), []).append(math.log(factor))
        self._rows = [(point, sum(values) / len(values)) for point, values in logs.items()]

    def at(self, coordinates: Sequence[float]) -> float:
        """The factor; 1 if nothing is known."""
        if not self._rows:
            return 1.0
        target = _log(coordinates)
        total = weights = 0.0
        for point, value in self._rows:
            squared = sum((a - b) ** 2 for a, b in zip(point, target, strict=True))
            if squared < 1e-18:
                return math.exp(value)
            total += value / squared
            weights += 1 / squared
        return math.exp(total / weights)


def _log(coordinates: Sequence[float]) -> Point:
    return tuple(math.log(value) for value in coordinates)
