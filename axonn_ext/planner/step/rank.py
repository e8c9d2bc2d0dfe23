"""A rank of a pipe coordinate: the sizes of its tensors, and the collectives that it issues.

Legend: m rows (tokens) of a (data, z) group in a micro-batch; a Linear [N, K] of role (r, s); Gx
the size of axis x. The bytes of a collective are those that one rank sends with the algorithm that
sends least. Sources of the volumes: arXiv:2305.13525 and arXiv:2502.08145 (`replicated`);
docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from axonn_ext.planner.job import Job
from axonn_ext.planner.step.stage_models import share_of
from axonn_ext.planner.step.tasks import Collective

FP32, FP64 = 4, 8  # the bytes of an element


class Rank:
    """A rank of one job on a pipe coordinate.

    model      the model, with its vocabulary padded for the grid
    share      its stage's share of the model
    size       axis -> its size
    m          rows; m_x: those of the residual stream; m_y: those of attention, MLP and logits
    width      the bytes of an element of a parameter or activation
    sums       the kind of the collective that sums a product over an axis
    num_parts  how many data ranks shard AdamW's state (ZeRO); 1: each has all of it
    """

    def __init__(self, job: Job, stage: int = 0) -> None:
        self.job, self.model, self.options = job, job.placed_model, job.options
        self.stage, self.share = stage, share_of(job, stage)
        self.in_stages = job.grid.pipe > 1
        self.size = job.grid.as_dict()
        self.m, self.width = job.rows, job.options.width
        sharded = job.options.sharded
        self.m_x = self.m // self.size["x"] if sharded else self.m
        self.m_y = self.m // self.size["y"] if sharded else self.m
        self.num_parts = job.num_parts
        self.sums = "reduce_scatter" if sharded else "all_reduce"

    @property
    def defers(self) -> bool:
        """Whether weight gradients are deferred, that is, computed separately from backward."""
        return self.in_stages and self.options.pipeline.defers

    def collective(
        self, kind: str, axis: str, num_elements: int, width: int, what: str
    ) -> Collective | None:
        """Returns a collective; None on an axis of one rank.

        num_elements: the elements that a rank passes in, as for torch.distributed.
        """
        g = self.size[axis]
        if g == 1 or num_elements == 0:
            return None
        passed = (g - 1) * num_elements
        if kind == "all_reduce":
            passed = -(-2 * passed // g)
        elif kind == "reduce_scatter":
            passed = -(-passed // g)
        return Collective(axis, kind, passed * width, what)


def present(collectives: Iterable[Collective | None]) -> tuple[Collective, ...]:
    """Returns the collectives that are issued, which are not None."""
    return tuple(c for c in collectives if c is not None)
