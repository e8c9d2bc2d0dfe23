"""Properties of the GPT-2 family."""

from __future__ import annotations

from axonn_ext.spec.family import BLOCK_LINEARS, LAYER_NORM, Family
from axonn_ext.spec.hugging_face import HuggingFace, StateNames


def mlp_size(hidden_size: int) -> int:
    """Returns four times the hidden size."""
    return 4 * hidden_size


FAMILY = Family(
    name="gpt2",
    activation="gelu",
    rotary=False,
    grouped_query=False,
    norm=LAYER_NORM,
    biases=BLOCK_LINEARS,
    default_mlp_size=mlp_size,
    hugging_face=HuggingFace(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        names=StateNames(
            body="transformer",
            blocks="h",
            norm="ln_f",
            table="wte",
            positions="wpe",
            block={
                "norm_1": "ln_1",
                "norm_2": "ln_2",
                "attention.out": "attn.c_proj",
                "mlp.up": "mlp.c_fc",
                "mlp.down": "mlp.c_proj",
            },
            qkv=("attn.c_attn",),
            transposed=True,
            own_table="wte",
        ),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "sequence_length": "n_positions",
            "intermediate_size": "n_inner",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
        },
        # These are the defaults of transformers' GPT2Config.
        defaults={
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "n_inner": None,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
        },
        activation_key="activation_function",
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # all are tanh GELU
        must_be_false={
            "scale_attn_by_inverse_layer_idx": "all layers scale their scores alike",
            "add_cross_attention": "family 'gpt2' attends only to its own tokens",
        },
        must_be_true={"scale_attn_weights": "scores are divided by sqrt(head_dim)"},
    ),
)
