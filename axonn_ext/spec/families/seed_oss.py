"""Properties of the Seed-OSS family: Llama's layers with a bias of qkv."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA

# ByteDance Seed 2025; defaults of transformers' SeedOssConfig.
FAMILY = replace(
    LLAMA,
    name="seed_oss",
    biases=("qkv",),
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        defaults={**LLAMA.hugging_face.defaults, "num_key_value_heads": 8},
        bias_keys={
            "attention_bias": ("qkv",),
            "attention_out_bias": ("out",),
            "mlp_bias": ("up", "down"),
        },
        head_size=128,
    ),
)
