"""Builds a model of any family on a grid, with its initial values."""

from __future__ import annotations

import torch

from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import initialize
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.stages import Stages


def build(
    config: ModelConfig,
    grid: Grid,
    parallel: ParallelConfig | None = None,
    *,
    stages: Stages | None = None,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Returns the model with its initial values, which are the same on every grid.

    stages: the blocks of each stage of the grid's pipeline; see Transformer. seed: None leaves the
    parameters uninitialised, for values that are read from files.

    Raises ValueError, which names the parameter and the numbers, if the grid does not divide the
    model. `check` lists all broken rules without building anything.
    """
    # Initial values are computed on the CPU, so that every device has the same bits.
    first = "cpu" if seed is not None else device
    model = Transformer(
        config, grid, parallel or ParallelConfig(), stages=stages, dtype=dtype, device=first
    )
    if seed is not None:
        initialize(model, seed=seed)
    if torch.device(device).type != "cpu":  # `to` would fail for fake tensors
        model.to(device)
    return model
