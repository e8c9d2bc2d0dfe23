"""Properties of the text models of the Gemma 3 family: Gemma 2's layers, with norms of queries and
keys instead of caps. Blocks with a window rotate by another base.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gemma2 import FAMILY as GEMMA2
from axonn_ext.spec.hugging_face import FullLayers

# Gemma Team, arXiv:2503.19786; defaults of transformers' Gemma3TextConfig.
FAMILY = replace(
    GEMMA2,
    name="gemma3",
    qk_norm="head",
    rotates_locally=True,
    hugging_face=replace(
        GEMMA2.hugging_face,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults={
            **GEMMA2.hugging_face.defaults,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        full_layers=FullLayers("every", 6, "sliding_window_pattern"),
        local_theta_key="rope_local_base_freq",
    ),
)
