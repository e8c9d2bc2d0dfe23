"""Runs the blocks of a model, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from axonn_ext.models.block import NOT_HELD, Block
from axonn_ext.nn import Places

# Returns the output of a block for x, sequences of this length, at these places.
RunBlock = Callable[[Block, Tensor, int, Places | None], Tensor]


def run_block(
    block: Block, x: Tensor, sequence_length: int, places: Places | None, *held: Tensor
) -> Tensor:
    """Returns a block's output. held: the weights of its Linears, if a weight_source has them."""
    return block(x, sequence_length, places, None, held or NOT_HELD)


def compiled_blocks() -> RunBlock:
    """Returns a `run_block` that compiles each kind of block once, as one graph.

    Blocks are of one kind if they differ only in the values of their tensors. Code is compiled at
    the first call, and again for another shape, with and without gradients.

    With an Orchestrator, a block's weights are gathered, held and freed together, outside of its
    code. Their gradients reach the Orchestrator together, when backward leaves the block.
    """
    compiled = torch.compile(run_block, fullgraph=True, dynamic=False)

    def run(block: Block, x: Tensor, sequence_length: int, places: Places | None) -> Tensor:
        first = block.linears[0]
        if first.deferral is not None:
            raise ValueError(
                "compile_blocks: compiled blocks cannot defer weight gradients: close the "
                "DeferredWeightGradients, or do not compile the blocks"
            )
        compute = partial(compiled, block, x, sequence_length, places)
        if first.weight_source is None:
            return compute()
        weights = [linear.gather_weight() for linear in block.linears]
        return first.weight_source.apply(weights, compute)

    return run
