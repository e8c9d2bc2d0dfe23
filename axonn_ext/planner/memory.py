"""Bytes that a rank holds, item by item."""

from __future__ import annotations

from typing import NamedTuple

from axonn_ext.planner.options import Job
from axonn_ext.planner.program import parameters_of_rank


class Memory(NamedTuple):
    """Bytes of one rank, at the moment of the step when they are most in all.

    parameters        in the job's dtype
    gradients         in the job's dtype
    optimizer         AdamW's two moments in fp32, and fp32 masters of low-precision parameters
    gathered_weights  held whole over z
    activations       kept for backward, of all blocks, and what one block needs beside them
    logits            of lm_head and the loss
    buffers           of gradients on their way, of collectives and of fused ops
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_weights: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the item that takes most."""
        return max(self._fields, key=lambda name: getattr(self, name))


def memory_of(job: Job) -> Memory:
    """What each rank of the job needs."""
    own, width = parameters_of_rank(job), job.options.width
    masters = 0 if width == 4 else 4
    return Memory(own * width, own * width, own * (8 + masters), 0, 0, 0, 0)
