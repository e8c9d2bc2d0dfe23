"""Properties of the Phi-3 family, including Phi-4: Llama's layers with fused weights."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.hugging_face import RotaryKeys

# Abdin et al., arXiv:2404.14219 and 2412.08905; defaults of transformers' Phi3Config.
FAMILY = replace(
    LLAMA,
    name="phi3",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        names=replace(
            LLAMA.hugging_face.names,
            qkv=("self_attn.qkv_proj",),
            gate_up=("mlp.gate_up_proj",),
        ),
        defaults={
            **LLAMA.hugging_face.defaults,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        bias_keys={},
        rotary=RotaryKeys(
            share="partial_rotary_factor",
            types={"longrope": "longrope", "su": "longrope", "yarn": "longrope"},
        ),
        window_key="sliding_window",
    ),
)
