"""What all Mistral models have in common: Llama's layers, and a window of attention.

Attention reaches back over a window of the tokens before. Over sequences that are no longer than
the window it is ordinary causal attention, and this is what there is here: a model that Hugging
Face describes with a window has sequences of that length at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from axonn_ext.models.llama import family as llama


def _mlp_size(hidden_size: int) -> int:
    """7/2 of it, as Mistral 7B has, in multiples of 64."""
    return math.ceil(7 * hidden_size / 2 / 64) * 64


# Jiang et al., arXiv:2310.06825; defaults of transformers' MistralConfig.
FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    title="Mistral",
    default_mlp_size=_mlp_size,
    hugging_face=replace(
        llama.FAMILY.hugging_face,
        model_type="mistral",
        defaults=dict(llama.FAMILY.hugging_face.defaults)
        | {"num_key_value_heads": 8, "sliding_window": 4096},
        must_be_false={},
        must_be_null={},
        window_key="sliding_window",
    ),
)
