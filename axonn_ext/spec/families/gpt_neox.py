"""Properties of the GPT-NeoX family, as in Pythia: attention and MLP side by side."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gpt2 import FAMILY as GPT2
from axonn_ext.spec.hugging_face import HuggingFace, RotaryKeys, StateNames

# Black et al., arXiv:2204.06745; defaults of transformers' GPTNeoXConfig.
FAMILY = replace(
    GPT2,
    name="gpt_neox",
    activation="gelu_erf",
    rotary=True,
    parallel=True,
    hugging_face=HuggingFace(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        names=StateNames(
            body="gpt_neox",
            blocks="layers",
            norm="final_layer_norm",
            table="embed_in",
            block={
                "norm_1": "input_layernorm",
                "norm_2": "post_attention_layernorm",
                "attention.out": "attention.dense",
                "mlp.up": "mlp.dense_h_to_4h",
                "mlp.down": "mlp.dense_4h_to_h",
            },
            qkv=("attention.query_key_value",),
            grouped=True,
            head="embed_out",
        ),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "sequence_length": "max_position_embeddings",
            "intermediate_size": "intermediate_size",
            "tie_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_eps",
            "init_std": "initializer_range",
        },
        defaults={
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "rotary_pct": 0.25,
        },
        activation_key="hidden_act",
        activations=("gelu",),
        bias_keys={"attention_bias": ("qkv", "out")},
        has_head_dim=False,
        rotary=RotaryKeys(theta="rotary_emb_base", share="rotary_pct"),
        must_be_true={
            "use_parallel_residual": "family 'gpt_neox' has the MLP in parallel with the attention"
        },
    ),
)
