"""What all Mistral models have in common: Llama's layers, and a sliding window of attention.

A token attends only to the tokens of a window before it. In sequences that are not longer than the
window this is ordinary causal attention. Windows are not implemented here, so the sequence_length
of a model that Hugging Face describes with a window is at most the window.
"""

from __future__ import annotations

import math

from axonn_ext.models.llama.family import HUGGING_FACE_KEYS
from axonn_ext.spec.family import RMS_NORM, Family, HuggingFace


def _mlp_size(hidden_size: int) -> int:
    """Returns 7/2 of the hidden size, as in Mistral 7B, rounded up to a multiple of 64."""
    return math.ceil(7 * hidden_size / 2 / 64) * 64


# Source: Jiang et al., arXiv:2310.06825.
FAMILY = Family(
    name="mistral",
    title="Mistral",
    has_biases=False,
    gated=True,
    rotary=True,
    grouped_query=True,
    norm=RMS_NORM,
    default_mlp_size=_mlp_size,
    hugging_face=HuggingFace(
        model_type="mistral",
        keys=HUGGING_FACE_KEYS,
        # These are the defaults of transformers' MistralConfig.
        defaults={
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "sliding_window": 4096,
        },
        activation_key="hidden_act",
        activations=("silu", "swish"),
        window_key="sliding_window",
    ),
)
