"""Norms against float64, in each dtype, on rows split over several ranks."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import Grid, GridShape, nn
from axonn_ext.nn.norm import HeadNorm
from grids import grid_of

ROWS, WIDTH = 64, 96
KINDS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "head": HeadNorm}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def reference(kind: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def worst(kind: str, dtype: torch.dtype, y: int) -> float:
    """The largest error of a value, in units of the dtype's precision at that value.

    One rounding is half a unit. The mean is as large as the spread, so it must be subtracted before
    anything is rounded.
    """
    grid: Grid = grid_of(GridShape(y=y))
    layer = KINDS[kind](WIDTH, grid=grid, dtype=dtype)
    torch.manual_seed(11)
    x = (torch.randn(ROWS, WIDTH, dtype=torch.float64) * 3 + 3).to(dtype)
    dims = {1: ("y",)} if kind != "head" else {}
    found = layer(grid.shard(x, dims)).double()
    want = grid.shard(reference(kind, x.double(), layer.eps), dims)
    unit = torch.finfo(dtype).eps * torch.maximum(want.abs(), torch.tensor(2.0**-3))
    return float(((found - want).abs() / unit).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "y"), [("layer", 1), ("layer", 2), ("rms", 2), ("head", 1)])
def test_statistics_are_wide(pool, kind, y, dtype) -> None:
    """In low precision, only the result is rounded, by half a unit, besides the sums in fp32.

    The limit is one unit, which some values would exceed with statistics in 16 bits. Wide dtypes
    round after each step.
    """
    limit = 1.01 if dtype.itemsize == 2 else 16.0
    errors = pool(y).run(worst, kind, dtype, y)
    assert max(errors) <= limit, errors
