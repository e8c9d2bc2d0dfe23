"""The operations that a step computes, including recomputation."""

from __future__ import annotations

from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.recompute import Recomputation
from axonn_ext.spec.stages import Stages


def hardware_flops_per_token(
    model: ModelConfig, recomputation: Recomputation, stages: Stages
) -> int:
    """Returns the floating-point operations per token of forward, recomputation and backward.

    They are those of ModelConfig.flops_per_token and those of the forward passes that backward runs
    again. Recomputation inside an attention kernel is not counted.
    """
    blocks = [sum(len(stages.blocks[v]) for v in stages.on(c)) for c in range(stages.pipe)]
    again = sum(recomputation.num_blocks(count) for count in blocks)
    flops = model.flops_per_token() + again * model.block_flops_per_token() // 3
    if recomputation.attention:
        flops += model.num_layers * model.attention_flops_per_token()
    return flops
