"""The bytes of weights that are held gathered over z."""

from __future__ import annotations

from axonn_ext.planner.memory.stage import Stage


def gathered_weights(stage: Stage) -> tuple[int, int, int]:
    """Returns the bytes of gathered weights at three moments of backward.

    These are its beginning, its first block and its last block.
    """
    if stage.z == 1:
        return 0, 0, 0
    size, kept = stage.size, stage.kept.weights
    if stage.overlap is None:
        # The weights of lm_head are freed after its backward. Of recomputed blocks, only the one
        # in backward keeps its weights.
        one = 0 if stage.options.reshard_after_forward else stage.block
        keep = stage.running - stage.again + stage.last_again
        return kept, one * keep, one
    # If the embedding has its own table, only later micro-batches need it again.
    tables = 1 if size.tied or stage.options.micro_batches == 1 or stage.in_stages else 2
    total = stage.layers * stage.block + stage.table * tables
    # Only a single weight that is larger than the budget may exceed it.
    single = size.runs[1] * stage.width // (stage.x * stage.y)
    budget = max(stage.overlap.gathered_bytes, single)
    blocks = min(stage.layers * stage.block, budget)
    # In the first block, the only micro-batch no longer needs the other blocks' weights.
    only = stage.options.micro_batches == 1 and not stage.in_stages
    last = min(stage.block, budget) if only else blocks
    return min(total, max(budget, stage.table)), blocks, last
