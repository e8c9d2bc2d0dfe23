"""Properties of the Gemma 2 family: Gemma's layers with more norms, capped scores and windows.

Every second block attends to all earlier tokens, the others to a window.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gemma import FAMILY as GEMMA
from axonn_ext.spec.hugging_face import BlockRule

# Gemma Team, arXiv:2408.00118; defaults of transformers' Gemma2Config.
_NAMES = GEMMA.hugging_face.names
FAMILY = replace(
    GEMMA,
    name="gemma2",
    norms=("norm_1", "after_1", "norm_2", "after_2"),
    hugging_face=replace(
        GEMMA.hugging_face,
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        names=replace(
            _NAMES,
            block={
                **_NAMES.block,
                "after_1": "post_attention_layernorm",
                "norm_2": "pre_feedforward_layernorm",
                "after_2": "post_feedforward_layernorm",
            },
        ),
        keys={
            **GEMMA.hugging_face.keys,
            "attention_scale": "query_pre_attn_scalar",
            "attention_softcap": "attn_logit_softcapping",
            "logits_softcap": "final_logit_softcapping",
        },
        powers={"attention_scale": -2},
        defaults={
            **GEMMA.hugging_face.defaults,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
        must_be_false={"use_bidirectional_attention": "a token attends only to earlier ones"},
        window_key="sliding_window",
        full_layers=BlockRule("every", 2, "sliding_window_pattern"),
    ),
)
