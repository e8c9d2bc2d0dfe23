"""Properties of Falcon 40B and 180B: groups of query heads; attention and MLP have a norm each."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.falcon_11b import FAMILY as FALCON_11B

# Almazrouei et al., arXiv:2311.16867; defaults of transformers' FalconConfig.
_NAMES = FALCON_11B.hugging_face.names
FAMILY = replace(
    FALCON_11B,
    name="falcon_40b",
    norms=("norm_1", "norm_2"),
    hugging_face=replace(
        FALCON_11B.hugging_face,
        when={"new_decoder_architecture": True},
        names=replace(_NAMES, block={**_NAMES.block, "norm_1": "ln_attn", "norm_2": "ln_mlp"}),
    ),
)
