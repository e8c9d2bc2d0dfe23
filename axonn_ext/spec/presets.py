"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from axonn_ext.spec.model import ModelConfig


def _gpt(num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    """Returns a GPT of AxoNN's papers, with GPT-2's vocabulary and sequences of 2,048 tokens."""
    return ModelConfig(51200, hidden_size, num_layers, num_heads, 2048)


def _gpt2(num_layers: int, hidden_size: int, num_heads: int) -> ModelConfig:
    return ModelConfig(50304, hidden_size, num_layers, num_heads, 1024)


def _llama2(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int,
    num_kv_heads: int | None = None,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        32000, hidden_size, num_layers, num_heads, 4096, family="llama", num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size, tie_embeddings=False,
    )  # fmt: skip


def _llama3(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int
) -> ModelConfig:
    return ModelConfig(
        128256, hidden_size, num_layers, num_heads, 8192, family="llama", num_kv_heads=8,
        intermediate_size=intermediate_size, tie_embeddings=False, rope_theta=500000.0,
    )  # fmt: skip


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        # Models of arXiv:2502.08145 and 2305.13525. Layers, hidden sizes and heads are those of
        # model-table.md in github.com/axonn-ai/Megatron-AxoNN. The vocabulary of 50257 tokens is
        # rounded up to 51200, a multiple of 1024.
        "gpt-5b": _gpt(24, 4096, 32),
        "gpt-10b": _gpt(32, 5120, 40),
        "gpt-20b": _gpt(32, 7168, 56),
        "gpt-40b": _gpt(38, 9216, 72),
        "gpt-60b": _gpt(56, 9216, 72),
        "gpt-80b": _gpt(42, 12288, 96),
        "gpt-160b": _gpt(84, 12288, 96),
        "gpt-320b": _gpt(96, 16384, 128),
        "gpt-640b": _gpt(192, 16384, 128),
        # Radford et al. 2019. The vocabulary of 50257 tokens is rounded up to a multiple of 128.
        "gpt2-small": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        # Touvron et al. 2023, arXiv:2307.09288.
        "llama2-7b": _llama2(32, 4096, 32, 11008),
        "llama2-13b": _llama2(40, 5120, 40, 13824),
        "llama2-70b": _llama2(80, 8192, 64, 28672, num_kv_heads=8),
        # Dubey et al. 2024, arXiv:2407.21783.
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
    }
)
