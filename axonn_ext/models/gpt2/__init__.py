"""Properties of the GPT-2 family."""

from __future__ import annotations

from axonn_ext.spec.family import LAYER_NORM, Family, HuggingFace


def _mlp_size(hidden_size: int) -> int:
    return 4 * hidden_size


FAMILY = Family(
    name="gpt2",
    modules="gpt2",
    has_biases=True,
    activation="gelu",
    rotary=False,
    grouped_query=False,
    norm=LAYER_NORM,
    default_mlp_size=_mlp_size,
    hugging_face=HuggingFace(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
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
