"""Properties of the OLMo 2 family: norms after attention and MLP, and of all queries and keys."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA

# OLMo et al., arXiv:2501.00656; defaults of transformers' Olmo2Config.
_NAMES = LLAMA.hugging_face.names
FAMILY = replace(
    LLAMA,
    name="olmo2",
    qk_norm="all",
    norms=("after_1", "after_2"),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        names=replace(
            _NAMES,
            block={
                **_NAMES.block,
                "after_1": "post_attention_layernorm",
                "after_2": "post_feedforward_layernorm",
            },
        ),
        defaults={**LLAMA.hugging_face.defaults, "rms_norm_eps": 1e-5},
        bias_keys={"attention_bias": ("qkv", "out")},
    ),
)
