"""Properties of the Granite family: Llama's layers with four factors that the model states."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA

# Granite 3 and 4 (dense), IBM 2024; defaults of transformers' GraniteConfig.
FAMILY = replace(
    LLAMA,
    name="granite",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="granite",
        architecture="GraniteForCausalLM",
        keys={
            **LLAMA.hugging_face.keys,
            "attention_scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logits_scale": "logits_scaling",
        },
        powers={"logits_scale": -1},
        defaults={
            **LLAMA.hugging_face.defaults,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
)
