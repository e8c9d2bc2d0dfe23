"""Models with their vocabulary padded for a grid that does not divide it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.vocabulary import padded_vocab_size


def padded_model(model: ModelConfig, grid: GridShape) -> ModelConfig:
    """Returns the model with its vocabulary padded for a grid."""
    size = padded_vocab_size(model.vocab_size, grid)
    return model if size == model.vocab_size else _with_vocabulary(model, size)


@lru_cache(maxsize=256)
def _with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    return replace(model, vocab_size=size)
