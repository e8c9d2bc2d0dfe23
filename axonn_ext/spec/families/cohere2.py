"""Properties of the Cohere 2 family (Command R7B, Command A): only blocks with a window rotate."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.cohere import FAMILY as COHERE
from axonn_ext.spec.hugging_face import BlockRule

# Cohere Team, arXiv:2504.00698; defaults of transformers' Cohere2Config.
FAMILY = replace(
    COHERE,
    name="cohere2",
    rotates_windows=True,
    hugging_face=replace(
        COHERE.hugging_face,
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        defaults={
            **COHERE.hugging_face.defaults,
            "sliding_window": 4096,
            "rope_theta": 10000.0,
        },
        must_be_false={},
        window_key="sliding_window",
        full_layers=BlockRule("every", 4, "sliding_window_pattern"),
    ),
)
