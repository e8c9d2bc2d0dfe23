"""Times the GEMM of "fused" on each of its tiles, next to torch.mm and the modelled times."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from axonn_ext.bench.link_overlap import time_calls
from axonn_ext.calibrate.measure import Timing
from axonn_ext.calibrate.shapes import PUBLISHED_LAYERS, GemmShape
from axonn_ext.kernels import extension
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.rows import Column

ALL_TILES = "all"
TORCH = "torch.mm"
TILE_ROWS = (512, 1024, 2048, 4096, 8192, 16384)
# The layers of calibrate/shapes.py as "expand" has them.
TILE_SHAPES = tuple(GemmShape(m, n, k) for n, k in PUBLISHED_LAYERS for m in TILE_ROWS)
COLUMNS = (
    Column("M,N,K", 17, is_number=True),
    Column("layout"),
    Column("kernel", 16),
    Column("median us", 9, is_number=True),
    Column("spread", 8, is_number=True),
    Column("TFLOP/s", is_number=True),
    Column("/torch.mm", is_number=True),
    Column("modelled us", is_number=True),
)


@dataclass(frozen=True)
class TileRow:
    """A product by torch.mm, or by the kernel on one tile.

    median_us, iqr_us  of the calls, timed in turns with those of the product's other rows
    modelled_us        the modelled time by which a tile is chosen; None for torch.mm
    chosen             whether the kernel takes this tile when none is requested
    over_torch         median_us over that of torch.mm
    max_difference     difference from torch.mm's result, relative to its largest element
    """

    op: str
    shape: dict[str, int]
    dtype: str
    layout: str
    kernel: str
    median_us: float
    iqr_us: float
    tflops: float
    over_torch: float
    modelled_us: float | None
    chosen: bool
    max_difference: float

    def cells(self) -> tuple[str, ...]:
        """Returns the row's cells below COLUMNS."""
        return (
            ",".join(map(str, self.shape.values())),
            self.layout,
            f"{self.kernel} (chosen)" if self.chosen else self.kernel,
            f"{self.median_us:,.1f}",
            f"{self.iqr_us:,.1f}",
            f"{self.tflops:,.0f}",
            f"{self.over_torch:.3f}",
            "-" if self.modelled_us is None else f"{self.modelled_us:,.1f}",
        )


@dataclass(frozen=True)
class TileSummary:
    """How good the chosen tiles are, over the products for which they were timed.

    num_slower         products for which another tile was faster than the chosen one
    worst_choice       the largest time of a chosen tile over that of the fastest one
    worst_product      the M,N,K and layout of that product
    mean_over_torch    geometric mean of the chosen tile's time over that of torch.mm
    """

    num_products: int
    num_slower: int
    worst_choice: float
    worst_product: str
    mean_over_torch: float

    def sentence(self) -> str:
        return (
            f"over {self.num_products} products: the chosen tile takes {self.mean_over_torch:.3f} "
            f"of the time of {TORCH} (geometric mean); another one is faster in {self.num_slower}, "
            f"at most by a factor of {self.worst_choice:.3f} ({self.worst_product})"
        )


def summarize(rows: Sequence[TileRow]) -> list[TileSummary]:
    """Returns the summary; none if no chosen tile was timed."""
    products: dict[str, list[TileRow]] = {}
    for row in rows:
        if row.kernel != TORCH:
            name = f"{','.join(map(str, row.shape.values()))} {row.layout}"
            products.setdefault(name, []).append(row)
    chosen = {name: row for name, tiles in products.items() for row in tiles if row.chosen}
    if not chosen:
        return []
    fastest = {name: min(row.median_us for row in products[name]) for name in chosen}
    ratios = {name: row.median_us / fastest[name] for name, row in chosen.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return [TileSummary(
        num_products=len(chosen),
        num_slower=sum(ratio > 1 for ratio in ratios.values()),
        worst_choice=ratios[worst],
        worst_product=worst,
        mean_over_torch=statistics.geometric_mean(row.over_torch for row in chosen.values()),
    )]  # fmt: skip


def parse_tiles(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the tiles that --tiles names, like "128x256"; none for "all". Raises: UserError."""
    if list(texts) == [ALL_TILES]:
        return ()
    for text in texts:
        if not re.fullmatch(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", text):
            raise UserError(
                f"--tiles: expected {ALL_TILES}, or tiles by their rows and columns, like 128x256, "
                f"got {text!r}"
            )
    return tuple(dict.fromkeys(texts))


def tiles_of(known: Sequence[str], asked: Sequence[str]) -> tuple[str, ...]:
    """Returns the requested tiles, or all. Raises UserError for an unknown one."""
    if unknown := [tile for tile in asked if tile not in known]:
        raise UserError(f"--tiles: expected some of {', '.join(known)}, got {unknown[0]}")
    return tuple(asked) or tuple(known)


def measure_tiles(
    a: Tensor, b: Tensor, *, dtype: str, layout: str, asked: Sequence[str] = ()
) -> list[TileRow]:
    """Times a @ b by torch.mm and on each requested tile, by default on all, in turns.

    Needs an sm_90 GPU. dtype, layout: their names in the rows. Raises UserError for an unknown
    tile.
    """
    cuda = extension.cuda
    assert cuda is not None
    modelled_us = dict(cuda.gemm_tiles(a, b))
    chosen = min(modelled_us, key=lambda tile: modelled_us[tile])  # the first of equals, as in C++
    tiles = tiles_of(list(modelled_us), asked)
    want = torch.mm(a, b)
    scale = want.abs().max()
    calls: dict[str, Callable[[], Tensor]] = {
        TORCH: partial(torch.mm, a, b),
        **{tile: partial(cuda.gemm, a, b, tile=tile) for tile in tiles},
    }
    differences = {
        name: float(((call() - want).abs().max() / scale).item()) for name, call in calls.items()
    }
    timings = time_calls(calls)
    shape = {"M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}
    return [
        row_of(
            name, timings, shape=shape, dtype=dtype, layout=layout, chosen=chosen,
            modelled_us=modelled_us.get(name), max_difference=differences[name],
        )
        for name in calls
    ]  # fmt: skip


def row_of(
    kernel: str, timings: dict[str, Timing[None]], *, shape: dict[str, int], dtype: str,
    layout: str, chosen: str, modelled_us: float | None, max_difference: float,
) -> TileRow:  # fmt: skip
    """Returns the row of a kernel from the times of all kernels of its product."""
    timing = timings[kernel]
    return TileRow(
        op="gemm-tiles",
        shape=shape,
        dtype=dtype,
        layout=layout,
        kernel=kernel,
        median_us=timing.median_us,
        iqr_us=timing.iqr_us,
        tflops=2 * shape["M"] * shape["N"] * shape["K"] / timing.median_us / 1e6,
        over_torch=timing.median_us / timings[TORCH].median_us,
        modelled_us=modelled_us,
        chosen=kernel == chosen,
        max_difference=max_difference,
    )
