"""Properties of the StableLM family: Llama's layers with LayerNorm, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.family import LAYER_NORM
from axonn_ext.spec.hugging_face import RotaryKeys

# Bellagente et al., arXiv:2402.17834; defaults of transformers' StableLmConfig.
FAMILY = replace(
    LLAMA,
    name="stablelm",
    norm=LAYER_NORM,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        keys={**LLAMA.hugging_face.keys, "norm_eps": "layer_norm_eps"},
        defaults={
            **LLAMA.hugging_face.defaults,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        bias_keys={"use_qkv_bias": ("qkv",)},
        has_head_dim=False,
        rotary=RotaryKeys(share="partial_rotary_factor"),
        must_be_false={
            "qk_layernorm": "family 'stablelm' has no norms of queries and keys",
            "use_parallel_residual": "family 'stablelm' has the MLP after the attention",
        },
    ),
)
