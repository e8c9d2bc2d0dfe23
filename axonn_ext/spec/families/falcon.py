"""Properties of Falcon 7B: attention and MLP side by side after one norm, one key-value head."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gpt2 import FAMILY as GPT2
from axonn_ext.spec.family import BLOCK_LINEARS
from axonn_ext.spec.hugging_face import HuggingFace, StateNames

# Almazrouei et al., arXiv:2311.16867; defaults of transformers' FalconConfig.
FAMILY = replace(
    GPT2,
    name="falcon",
    activation="gelu_erf",
    rotary=True,
    multi_query=True,
    biases=(),
    norms=("norm_1",),
    parallel=True,
    hugging_face=HuggingFace(
        model_type="falcon",
        architecture="FalconForCausalLM",
        names=StateNames(
            body="transformer",
            blocks="h",
            norm="ln_f",
            table="word_embeddings",
            block={
                "norm_1": "input_layernorm",
                "attention.out": "self_attention.dense",
                "mlp.up": "mlp.dense_h_to_4h",
                "mlp.down": "mlp.dense_4h_to_h",
            },
            qkv=("self_attention.query_key_value",),
            grouped=True,
        ),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "sequence_length": "max_position_embeddings",
            "intermediate_size": "ffn_hidden_size",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
        },
        defaults={
            "max_position_embeddings": 2048,
            "ffn_hidden_size": None,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
        },
        activation_key="activation",
        activations=("gelu",),
        bias_keys={"bias": BLOCK_LINEARS},
        has_head_dim=False,
        must_be_false={"alibi": "family 'falcon' has rotary positions"},
        must_be_true={
            "multi_query": "family 'falcon' has one key-value head",
            "parallel_attn": "family 'falcon' has the MLP in parallel with the attention",
        },
    ),
)
