"""Properties of the Llama family."""

from __future__ import annotations

import math

from axonn_ext.spec.family import RMS_NORM, Family
from axonn_ext.spec.hugging_face import HuggingFace, StateNames


def _mlp_size(hidden_size: int) -> int:
    """Returns 8/3 of the hidden size, rounded up to a multiple of 64.

    The three matrices of the MLP then have as many elements as GPT-2's two.
    """
    return math.ceil(8 * hidden_size / 3 / 64) * 64


FAMILY = Family(
    name="llama",
    activation="swiglu",
    rotary=True,
    grouped_query=True,
    norm=RMS_NORM,
    default_mlp_size=_mlp_size,
    hugging_face=HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        names=StateNames(
            body="model",
            blocks="layers",
            norm="norm",
            table="embed_tokens",
            block={
                "norm_1": "input_layernorm",
                "norm_2": "post_attention_layernorm",
                "attention.out": "self_attn.o_proj",
                "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm",
                "mlp.down": "mlp.down_proj",
            },
        ),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "sequence_length": "max_position_embeddings",
            "intermediate_size": "intermediate_size",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "rms_norm_eps",
            "init_std": "initializer_range",
        },
        defaults={
            "num_key_value_heads": None,  # means num_attention_heads
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
        },
        activation_key="hidden_act",
        activations=("silu", "swish"),
        bias_keys={"attention_bias": ("qkv", "out"), "mlp_bias": ("up", "down")},
    ),
)
