"""A model of any family, on a grid and with its initial values."""

from __future__ import annotations

from importlib import import_module

import torch

from axonn_ext.grid import Grid
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import initialize
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig


def build(
    config: ModelConfig,
    grid: Grid,
    parallel: ParallelConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model with its initial values, which are the same on every grid.

    Raises ValueError, naming parameter and numbers, where the grid does not divide the model;
    `check` tells beforehand, for all rules at once.
    """
    modules = import_module(f"axonn_ext.models.{config.family}.model")
    model: Transformer = modules.MODEL(config, grid, parallel or ParallelConfig(), dtype=dtype)
    initialize(model, seed=seed)  # by the CPU: the same bits on every device
    if torch.device(device).type != "cpu":  # fake tensors cannot be moved
        model.to(device)
    return model
