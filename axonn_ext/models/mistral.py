"""What all Mistral models have in common: Llama's layers, and a sliding window of attention.

A token attends only to the tokens of a window before it. In sequences that are not longer than the
window this is ordinary causal attention. Windows are not implemented here, so the sequence_length
of a model that Hugging Face describes with a window is at most the window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from axonn_ext.models.llama import FAMILY as LLAMA


def _mlp_size(hidden_size: int) -> int:
    """Returns 7/2 of the hidden size, as in Mistral 7B, rounded up to a multiple of 64."""
    return math.ceil(7 * hidden_size / 2 / 64) * 64


# Jiang et al., arXiv:2310.06825; defaults of transformers' MistralConfig.
FAMILY = replace(
    LLAMA,
    name="mistral",
    default_mlp_size=_mlp_size,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults=dict(LLAMA.hugging_face.defaults)
        | {"num_key_value_heads": 8, "sliding_window": 4096},
        must_be_false={},
        must_be_null={},
        window_key="sliding_window",
    ),
)
