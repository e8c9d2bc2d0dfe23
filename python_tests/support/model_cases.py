"""Small transformers and a batch, used by several tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from axonn_ext.models import ModelConfig
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.spec.rope import RopeScaling

GPT2 = ModelConfig(
    family="gpt2", vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, sequence_length=8
)
LLAMA = dataclasses.replace(
    GPT2, family="llama", num_kv_heads=4, intermediate_size=48, tie_embeddings=False
)
# What config.json may say of a model of the family, other than sizes.
DETAILS: dict[str, dict[str, Any]] = {
    "stablelm": {"biases": ("qkv",), "rotary_size": 2},
    "gpt_neox": {"rotary_size": 2, "tie_embeddings": False},
    "gpt_neox_20b": {"rotary_size": 2, "tie_embeddings": False},
    "glm4": {"rotary_size": 2},
    "granite": {
        "attention_scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logits_scale": 0.25,
    },
    "smollm3": {"no_rope_layers": (1,)},
    "mistral": {"window": 3},
    "gemma2": {
        "window": 3, "window_layers": (0,), "attention_softcap": 0.5, "logits_softcap": 0.5,
    },
    "gemma3": {"window": 3, "window_layers": (0,), "local_rope_theta": 100.0},
    "cohere": {"logits_scale": 0.25},
    "cohere2": {"window": 3, "window_layers": (0,)},
    "olmo3": {"window": 3, "window_layers": (0,)},
}  # fmt: skip
LONG = RopeScaling(
    rope_type="longrope", original_max_position_embeddings=6, attention_factor=1.2,
    short_factor=(1.0, 1.5), long_factor=(2.0, 4.0),
)  # fmt: skip
CONFIGS = {
    **{
        name: dataclasses.replace(
            LLAMA if find_family(name).grouped_query else GPT2,
            family=name,
            **DETAILS.get(name, {}),
        )
        for name in FAMILIES
    },
    "llama-scaled": dataclasses.replace(LLAMA, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16)),
    "llama-long": dataclasses.replace(LLAMA, rope_scaling=LONG),
    "qwen3-wide": dataclasses.replace(LLAMA, family="qwen3", head_size=8),
    "llama-tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "gpt2-untied": dataclasses.replace(GPT2, tie_embeddings=False),
    # No grid divides these vocabularies, so they are padded.
    "gpt2-odd": dataclasses.replace(GPT2, vocab_size=67),
    "llama-odd": dataclasses.replace(LLAMA, vocab_size=131),
}
# Families whose layers are those of others, except for names of weights and the form of GELU.
ALIKE = (
    "phi3", "seed_oss", "starcoder2", "gemma", "olmo3", "falcon_40b", "falcon_11b", "gpt_neox_20b",
)  # fmt: skip
SAMPLE = ("gpt2", "llama", "qwen3-wide", "gpt2-odd", "llama-odd")
BATCH, LENGTH, MAX_NORM = 8, 8, 0.05


def is_daily(name: str, world_size: int) -> bool:
    return name in SAMPLE or (world_size == 2 and name not in ALIKE)


def sampled(names: Iterable[str], world_sizes: Collection[int]) -> list[object]:
    """Parameters (name, world size) for pytest. Models other than those of SAMPLE are slow tests,
    except on two ranks; those of ALIKE also there.
    """
    return [
        pytest.param(
            name, world_size,
            marks=[] if is_daily(name, world_size) else [pytest.mark.slow],
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
