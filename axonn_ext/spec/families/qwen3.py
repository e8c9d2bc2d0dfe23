"""Properties of the dense Qwen3 family: Llama's layers with query and key norms."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.hugging_face import BlockRule

# Yang et al., arXiv:2505.09388; defaults of transformers' Qwen3Config.
FAMILY = replace(
    LLAMA,
    name="qwen3",
    qk_norm="head",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=dict(LLAMA.hugging_face.defaults)
        | {"num_key_value_heads": 32, "sliding_window": 4096},
        bias_keys={"attention_bias": ("qkv", "out")},
        window_key="sliding_window",
        window_flag="use_sliding_window",
        full_layers=BlockRule("first", 28, "max_window_layers"),
        head_size=128,
    ),
)
