"""Properties of Falcon 2 (11B): Falcon 7B's layers with groups of query heads."""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.spec.families.falcon import FAMILY as FALCON

# Malartic et al., arXiv:2407.14885; defaults of transformers' FalconConfig.
_THEIRS = FALCON.hugging_face
FAMILY = replace(
    FALCON,
    name="falcon_11b",
    grouped_query=True,
    multi_query=False,
    hugging_face=replace(
        _THEIRS,
        when={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        keys={**_THEIRS.keys, "num_kv_heads": "num_kv_heads"},
        defaults={**_THEIRS.defaults, "num_kv_heads": None},
        must_be_true={"parallel_attn": _THEIRS.must_be_true["parallel_attn"]},
    ),
)
