"""Properties of GPT-NeoX-20B: Pythia's layers with the tanh form of GELU."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.gpt_neox import FAMILY as GPT_NEOX

# Black et al., arXiv:2204.06745; defaults of transformers' GPTNeoXConfig.
FAMILY = replace(
    GPT_NEOX,
    name="gpt_neox_20b",
    activation="gelu",
    hugging_face=replace(
        GPT_NEOX.hugging_face, when={"hidden_act": "gelu_fast"}, activations=("gelu_fast",)
    ),
)
