"""Properties of the first Gemma family: Llama's layers with GEGLU, and norms by 1 + weight."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.family import RMS_NORM_PLUS_ONE

# Gemma Team, arXiv:2403.08295; defaults of transformers' GemmaConfig.
FAMILY = replace(
    LLAMA,
    name="gemma",
    activation="geglu",
    norm=RMS_NORM_PLUS_ONE,
    scales_embedding=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="gemma",
        architecture="GemmaForCausalLM",
        defaults={
            **LLAMA.hugging_face.defaults,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
        },
        # "gelu" is what early files say for its tanh form.
        activations=("gelu_pytorch_tanh", "gelu"),
        bias_keys={"attention_bias": ("qkv", "out")},
        head_size=256,
    ),
)
