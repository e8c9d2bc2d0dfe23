"""Properties of the SmolLM3 family: Llama's layers, every fourth of which does not rotate."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.hugging_face import BlockRule, RotaryKeys

# Hugging Face 2025; defaults of transformers' SmolLM3Config.
FAMILY = replace(
    LLAMA,
    name="smollm3",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        rotary=RotaryKeys(unrotated=BlockRule("every", 4, "no_rope_layer_interval")),
        defaults={
            **LLAMA.hugging_face.defaults,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
        },
        must_be_false={"use_sliding_window": "attention is over whole sequences"},
    ),
)
