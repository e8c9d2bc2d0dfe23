"""Small transformers and a batch, used by several tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import pytest
import torch

from axonn_ext.models import ModelConfig
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.spec.model import RopeScaling

GPT2 = ModelConfig(
    family="gpt2", vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, sequence_length=8
)
LLAMA = dataclasses.replace(
    GPT2, family="llama", num_kv_heads=4, intermediate_size=48, tie_embeddings=False
)
CONFIGS = {
    **{
        name: dataclasses.replace(LLAMA if find_family(name).grouped_query else GPT2, family=name)
        for name in FAMILIES
    },
    "llama-scaled": dataclasses.replace(LLAMA, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16)),
    "qwen3-wide": dataclasses.replace(LLAMA, family="qwen3", head_size=8),
    "llama-tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "gpt2-untied": dataclasses.replace(GPT2, tie_embeddings=False),
    # No grid divides these vocabularies, so they are padded.
    "gpt2-odd": dataclasses.replace(GPT2, vocab_size=67),
    "llama-odd": dataclasses.replace(LLAMA, vocab_size=131),
}
SAMPLE = ("gpt2", "llama", "qwen3-wide", "gpt2-odd", "llama-odd")
BATCH, LENGTH, MAX_NORM = 8, 8, 0.05


def sampled(names: Iterable[str], world_sizes: Collection[int]) -> list[object]:
    """Parameters (name, world size) for pytest. With more than two ranks, all models but those of
    SAMPLE are slow tests.
    """
    return [
        pytest.param(
            name, world_size,
            marks=[] if world_size <= 2 or name in SAMPLE else [pytest.mark.slow],
        )
        for name in names
        for world_size in world_sizes
    ]  # fmt: skip


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; random labels are missing, so that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(64, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(64, (BATCH, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.25] = -100
    labels[1] = -100
    return ids, labels
