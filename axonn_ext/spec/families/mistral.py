"""Properties of the Mistral family: Llama's layers with sliding-window attention."""

from __future__ import annotations

import math
from dataclasses import replace

from axonn_ext.spec.families.llama import FAMILY as LLAMA


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
        bias_keys={},
        window_key="sliding_window",
    ),
)
