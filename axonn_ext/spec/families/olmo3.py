"""Properties of the OLMo 3 family: OLMo 2's layers, three of four of them with a window."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.olmo2 import FAMILY as OLMO2
from axonn_ext.spec.hugging_face import BlockRule, RotaryKeys

# Ai2 2025; defaults of transformers' Olmo3Config.
FAMILY = replace(
    OLMO2,
    name="olmo3",
    rotates_locally=True,
    hugging_face=replace(
        OLMO2.hugging_face,
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        defaults={
            **OLMO2.hugging_face.defaults,
            "sliding_window": 4096,
            "rope_theta": 500000.0,
        },
        window_key="sliding_window",
        full_layers=BlockRule("every", 4, "sliding_window_pattern"),
        rotary=RotaryKeys(nested=True),
    ),
)
