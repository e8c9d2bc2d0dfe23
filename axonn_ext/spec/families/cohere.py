"""Properties of the Cohere family (Command R): attention and MLP side by side after one norm."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.family import LAYER_NORM_WITHOUT_BIAS

# Cohere 2024; defaults of transformers' CohereConfig.
FAMILY = replace(
    LLAMA,
    name="cohere",
    norm=LAYER_NORM_WITHOUT_BIAS,
    norms=("norm_1",),
    parallel=True,
    interleaved=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="cohere",
        architecture="CohereForCausalLM",
        keys={
            **LLAMA.hugging_face.keys,
            "norm_eps": "layer_norm_eps",
            "logits_scale": "logit_scale",
        },
        defaults={
            **LLAMA.hugging_face.defaults,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 500000.0,
        },
        bias_keys={"attention_bias": ("qkv", "out")},
        must_be_false={"use_qk_norm": "family 'cohere' has no norms of queries and keys"},
    ),
)
