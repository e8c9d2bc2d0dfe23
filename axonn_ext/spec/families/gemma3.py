"""Properties of the text models of the Gemma 3 family: Gemma 2's layers, with norms of queries and
keys instead of caps. Blocks with a window rotate by another base.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gemma2 import FAMILY as GEMMA2
from axonn_ext.spec.hugging_face import BlockRule, Multimodal, RotaryKeys

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
        # Their own weights, of images, are left out.
        multimodal=Multimodal(
            "gemma3",
            bodies=("model.language_model.", "language_model.model."),
            others=("vision_tower.", "multi_modal_projector."),
        ),
        defaults={
            **GEMMA2.hugging_face.defaults,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "intermediate_size": 9216,
            "max_position_embeddings": 131072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        full_layers=BlockRule("every", 6, "sliding_window_pattern"),
        rotary=RotaryKeys(local_theta="rope_local_base_freq"),
    ),
)
