"""Offers the matmul as a way to compute a Linear's product (csrc/ops/tuning/product.h).

Each config is a separate candidate under its own name. So the config that is measured, agreed upon
by ranks and kept on disk is the one that runs; Triton does no tuning itself.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from axonn_ext.kernels.triton.launch import DTYPES, is_known, limits_of
from axonn_ext.kernels.triton.matmul import launch, problem_of
from axonn_ext.kernels.triton.tile_configs import (
    TileConfig,
    candidates,
    legal_configs,
    why_illegal,
)

# The number of configs to measure, the first in the cost model's ranking. Compiling one takes about
# a second for each layout and divisibility of sizes; triton keeps compiled kernels on disk.
NUM_OFFERED = 4


def _takes(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    contiguous = bias is None or bias.is_contiguous()
    return a.dtype in DTYPES and contiguous and is_known(a.device)


def offered_configs(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
    """Returns the version of triton, then config names; [] for unsupported operands."""
    if not _takes(a, b, bias):
        return []
    problem = problem_of(a, b, bias)
    legal = legal_configs(problem, limits_of(a.device))[:NUM_OFFERED]
    return [triton.__version__, *(config.name for config in legal)] if legal else []


@functools.cache
def _by_name(element_bytes: int, amd: bool) -> dict[str, TileConfig]:
    return {config.name: config for config in candidates(element_bytes, amd=amd)}


def product(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
    """Returns [a @ b (+ bias)], computed with that config; [] if it is illegal for the operands."""
    if not _takes(a, b, bias):
        return []
    problem = problem_of(a, b, bias)
    limits = limits_of(a.device)
    config = _by_name(a.element_size(), limits.is_amd).get(name)
    if config is None or why_illegal(config, problem, limits):
        return []
    with torch.cuda.device_of(a):
        return [launch(a, b, bias, problem=problem, config=config)]
