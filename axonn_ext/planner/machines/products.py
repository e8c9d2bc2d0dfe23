"""Predicts how long matrix products take on a machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from axonn_ext.planner.job import WIDTHS
from axonn_ext.planner.machines.interpolation import LogField
from axonn_ext.planner.step.tasks import Matmul
from axonn_ext.spec.files.tables import Table
from axonn_ext.spec.products import PRODUCT_LAYOUTS

_KEPT = 1 << 16  # the largest number of times in the cache, about 20 MB
_LEAST_K = 512  # the smallest k of one part of a split-k product (a guess)


class MeasuredMatmul(NamedTuple):
    """A measured product; seconds: the time of one product including its launch."""

    matmul: Matmul
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Products:
    """The products of one rank.

    best_flops: dtype -> flop/s of the best product. num_units: the number of SMs or CUs, each of
    which computes one tile at a time. tiles: (rows, columns, rate relative to the best); empty if
    tiles do not matter.
    """

    best_flops: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float
    num_units: int = 1
    tiles: tuple[tuple[int, int, float], ...] = ()
    measured: tuple[MeasuredMatmul, ...] = ()

    @cached_property
    def seconds(self) -> Callable[[Matmul, str], float]:
        """A cached function (product, dtype) -> its time including its launch."""
        return functools.lru_cache(maxsize=_KEPT)(self._find)

    def _find(self, matmul: Matmul, dtype: str) -> float:
        """Returns the model's time, corrected by the model's error at nearby measured sizes.

        Uses the measurements of the same layout, or of all layouts if it has none.
        """
        seconds, (m, n, k, layout) = self._model(matmul, dtype), matmul
        fields = self._fields
        field = fields.get((dtype, layout)) or fields.get((dtype, ""))
        return seconds if field is None else seconds * field.at((m, n, k))

    def _model(self, matmul: Matmul, dtype: str) -> float:
        """Returns the model's time: the waves of tiles, or the memory traffic if that takes longer.

        A product with fewer tiles than units is split along k.

        Source: NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantisation);
        Williams, Waterman, Patterson 2009 (roofline).
        """
        m, n, k, _ = matmul
        rate, units = self.best_flops[dtype], self.num_units
        memory = WIDTHS[dtype] * (m * k + k * n + m * n) / self.memory_bytes_per_s
        if not self.tiles:
            return max(2 * m * n * k / rate, memory) + self.launch_s
        best, element_s = math.inf, 2 * k * units / rate  # one unit's time per element of a tile
        for rows, columns, relative in self.tiles:
            tiles = -(-m // rows) * -(-n // columns)
            seconds = -(-tiles // units) * rows * columns * element_s / relative
            parts = min(units // tiles, k // _LEAST_K) if tiles < units else 1
            if parts > 1:  # each part writes its sums in fp32, and they are read again
                seconds = max(seconds / parts, 8 * m * n * parts / self.memory_bytes_per_s)
            best = min(best, seconds)
        return max(best, memory) + self.launch_s

    @cached_property
    def _fields(self) -> dict[tuple[str, str], LogField]:
        """The ratios of measured to modelled times, by dtype and layout ("" for all layouts)."""
        rows: dict[tuple[str, str], list[tuple[tuple[int, int, int], float]]] = {}
        for matmul, dtype, seconds in self.measured:
            factor = seconds / self._model(matmul, dtype)
            for layout in (matmul.layout, ""):
                rows.setdefault((dtype, layout), []).append((matmul[:3], factor))
        return {key: LogField(values) for key, values in rows.items()}


def read_products(
    table: Table, peak_flops: Mapping[str, float], *, memory_bytes_per_s: float, launch_s: float
) -> Products:
    """Reads the table `matmul` of a machine's file. Raises InputError naming file and key."""
    share = table.table("max_efficiency").numbers(tuple(peak_flops), tuple(peak_flops), most=1)
    products = Products(
        best_flops={dtype: peak * share[dtype] for dtype, peak in peak_flops.items()},
        memory_bytes_per_s=memory_bytes_per_s,
        launch_s=launch_s,
        num_units=table.count("num_units", 1),
        tiles=tuple(_read_tiles(table)),
        measured=tuple(_read_measured(row, tuple(peak_flops)) for row in table.tables("measured")),
    )
    table.finish()
    return products


def _read_tiles(table: Table) -> list[tuple[int, int, float]]:
    tiles = []
    for tile in table.list("tiles"):
        numbers = isinstance(tile, list) and all(type(v) in (int, float) for v in tile)
        if not numbers or len(tile) != 3 or not (tile[0] >= 1 <= tile[1] and 0 < tile[2] <= 1):
            raise table.error("tiles", "an array of [rows, columns, relative rate in (0, 1]]")
        tiles.append((int(tile[0]), int(tile[1]), float(tile[2])))
    return tiles


def _read_measured(row: Table, dtypes: tuple[str, ...]) -> MeasuredMatmul:
    m, n, k = (row.count(key) for key in ("m", "n", "k"))
    measured = MeasuredMatmul(
        Matmul(m, n, k, row.one_of("layout", PRODUCT_LAYOUTS)),
        row.one_of("dtype", dtypes),
        row.positive("seconds"),
    )
    row.finish()
    return measured
