"""Properties of the OPT family: GPT-2's layers with ReLU.

The table of positions begins with two unused rows.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gpt2 import FAMILY as GPT2
from axonn_ext.spec.hugging_face import HuggingFace, StateNames

# Zhang et al., arXiv:2205.01068; defaults of transformers' OPTConfig.
FAMILY = replace(
    GPT2,
    name="opt",
    activation="relu",
    position_offset=2,
    hugging_face=HuggingFace(
        model_type="opt",
        architecture="OPTForCausalLM",
        names=StateNames(
            body="model.decoder",
            blocks="layers",
            norm="final_layer_norm",
            table="embed_tokens",
            positions="embed_positions",
            block={
                "norm_1": "self_attn_layer_norm",
                "norm_2": "final_layer_norm",
                "attention.out": "self_attn.out_proj",
                "mlp.up": "fc1",
                "mlp.down": "fc2",
            },
        ),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "sequence_length": "max_position_embeddings",
            "intermediate_size": "ffn_dim",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "init_std",
        },
        defaults={
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "ffn_dim": 3072,
            "tie_word_embeddings": True,
            "init_std": 0.02,
        },
        activation_key="activation_function",
        activations=("relu",),
        must_be_false={"_remove_final_layer_norm": "family 'opt' ends with a norm"},
        must_be_true={
            "do_layer_norm_before": "family 'opt' normalises before attention and MLP",
            "enable_bias": "family 'opt' has biases",
            "layer_norm_elementwise_affine": "family 'opt' has norms with weights",
        },
        must_equal={"word_embed_proj_dim": "hidden_size"},
    ),
)
