"""Transformers for a grid: GPT-2 and Llama style, from one frozen config."""

from __future__ import annotations

import torch

from axonn_ext.grid import Grid
from axonn_ext.models.config import ModelConfig, ParallelConfig, check
from axonn_ext.models.gpt2.model import GPT2
from axonn_ext.models.llama.model import Llama
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import initialize

__all__ = ["GPT2", "Llama", "ModelConfig", "ParallelConfig", "Transformer", "build", "check"]


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
    model_class = {"gpt2": GPT2, "llama": Llama}[config.family]
    model = model_class(config, grid, parallel or ParallelConfig(), dtype=dtype)
    initialize(model, seed=seed)  # by the CPU: the same bits on every device
    if torch.device(device).type != "cpu":  # fake tensors cannot be moved
        model.to(device)
    return model
