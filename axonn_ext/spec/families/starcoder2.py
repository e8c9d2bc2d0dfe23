"""Properties of the StarCoder2 family: Llama's attention, LayerNorm, GELU and biases."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gpt2 import mlp_size
from axonn_ext.spec.families.llama import FAMILY as LLAMA
from axonn_ext.spec.family import BLOCK_LINEARS, LAYER_NORM

# Lozhkov et al., arXiv:2402.19173; defaults of transformers' Starcoder2Config.
_NAMES = LLAMA.hugging_face.names
FAMILY = replace(
    LLAMA,
    name="starcoder2",
    activation="gelu",
    norm=LAYER_NORM,
    biases=BLOCK_LINEARS,
    default_mlp_size=mlp_size,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        names=replace(
            _NAMES, block={**_NAMES.block, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        ),
        keys={**LLAMA.hugging_face.keys, "norm_eps": "norm_epsilon"},
        defaults={
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "norm_epsilon": 1e-5,
            "initializer_range": 0.018042,
            "sliding_window": None,
        },
        activations=("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
        bias_keys={"use_bias": BLOCK_LINEARS},
        window_key="sliding_window",
    ),
)
