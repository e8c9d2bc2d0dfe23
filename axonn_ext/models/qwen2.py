"""Properties of the Qwen2 family, including Qwen2.5: Llama's layers with a qkv bias."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.models.llama import FAMILY as LLAMA

# Yang et al., arXiv:2407.10671; defaults of transformers' Qwen2Config.
FAMILY = replace(
    LLAMA,
    name="qwen2",
    has_qkv_bias=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=dict(LLAMA.hugging_face.defaults) | {"num_key_value_heads": 32},
        must_be_false={"use_sliding_window": "attention is over whole sequences"},
        must_be_null={},
    ),
)
