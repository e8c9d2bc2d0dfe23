"""Interpolates between measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, ...]


class LogField:
    """The factor by which a model is wrong, known at some points; 1 where the model is right.

    Between the points its logarithm is the mean of theirs, weighted by the inverse square of the
    distance; coordinates are logarithms as well (Shepard 1968). So it is exact at the points, and
    far away from them it is their mean.
    """

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        logs: dict[Point, list[float]] = {}
        for coordinates, factor in rows:
            logs.setdefault(_log(coordinates), []).append(math.log(factor))
        self._rows = [(point, sum(values) / len(values)) for point, values in logs.items()]

    def at(self, coordinates: Sequence[float]) -> float:
        """Returns the factor; 1 if there are no points."""
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
