"""A product large enough to be tuned, and the variants that a CPU has for it."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext import GridShape, nn
from grids import grid_of

CPU_VARIANTS = ("direct", "transposed", "relayout_a", "relayout_b")


# Large enough for Linears to tune it: 2 ** 24 multiply-adds.
M, N, K = 256, 256, 256


def linear_and_input() -> tuple[nn.Linear, Tensor]:
    grid = grid_of(GridShape(x=2))
    linear = nn.Linear(512, 512, grid=grid, role="expand", bias=False, layout="sharded")
    return linear, torch.linspace(-1, 1, 128 * 512).view(128, 512)
