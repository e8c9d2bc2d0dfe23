"""Properties of the GLM-4 family: norms before and after attention and MLP, half-rotated heads."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.hugging_face import RotaryKeys

# GLM-4-0414; defaults of transformers' Glm4Config.
_NAMES = LLAMA.hugging_face.names
FAMILY = replace(
    LLAMA,
    name="glm4",
    biases=("qkv",),
    norms=("norm_1", "after_1", "norm_2", "after_2"),
    interleaved=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        names=replace(
            _NAMES,
            block={
                **_NAMES.block,
                "after_1": "post_self_attn_layernorm",
                "after_2": "post_mlp_layernorm",
            },
            gate_up=("mlp.gate_up_proj",),
        ),
        defaults={
            **LLAMA.hugging_face.defaults,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
        },
        bias_keys={"attention_bias": ("qkv",)},
        rotary=RotaryKeys(share="partial_rotary_factor"),
        head_size=128,
    ),
)
