"""Properties of the Qwen2 family, including Qwen2.5: Llama's layers with a qkv bias."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.hugging_face import BlockRule

# Yang et al., arXiv:2407.10671; defaults of transformers' Qwen2Config.
FAMILY = replace(
    LLAMA,
    name="qwen2",
    biases=("qkv",),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=dict(LLAMA.hugging_face.defaults)
        | {"num_key_value_heads": 32, "sliding_window": 4096},
        bias_keys={},
        window_key="sliding_window",
        window_flag="use_sliding_window",
        full_layers=BlockRule("first", 28, "max_window_layers"),
    ),
)
