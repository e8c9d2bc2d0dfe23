"""Properties of the dense Qwen3 family: Llama's layers with query and key norms."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.models.llama import FAMILY as LLAMA

# Yang et al., arXiv:2505.09388; defaults of transformers' Qwen3Config.
FAMILY = replace(
    LLAMA,
    name="qwen3",
    has_head_norms=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=dict(LLAMA.hugging_face.defaults) | {"num_key_value_heads": 32},
        must_be_false={
            "attention_bias": "family 'qwen3' has no biases",
            "use_sliding_window": "attention is over whole sequences",
        },
        must_be_null={},
        head_size=128,
    ),
)
