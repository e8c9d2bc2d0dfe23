"""Each pipeline stage's share of a model."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.stages import Stages


class StageShare(NamedTuple):
    """The share of one pipe coordinate, all its virtual stages together.

    num_layers       its number of blocks
    has_first        whether the embedding is there
    has_last         whether the last norm, the head and the loss are there
    forward_sends    the activations that it sends for each micro-batch
    backward_sends   the gradients that it sends for each micro-batch

    Per micro-batch, it receives as many activations as it sends gradients, and the other way round.
    """

    num_layers: int
    has_first: bool
    has_last: bool
    forward_sends: int
    backward_sends: int


def shares_of(job: Job) -> tuple[StageShare, ...]:
    """Returns the share of each pipe coordinate of a legal job."""
    return shares_of_model(job.model, job.grid.pipe, job.options.pipeline.chunks)


def share_of(job: Job, stage: int) -> StageShare:
    """Returns the share of one pipe coordinate of a legal job."""
    return shares_of(job)[stage]


def shares_of_model(model: ModelConfig, pipe: int, chunks: int) -> tuple[StageShare, ...]:
    """Returns the share of each of `pipe` coordinates, which have `chunks` virtual stages each."""
    if pipe == 1:
        return (StageShare(model.num_layers, True, True, 0, 0),)
    return _shares_of_stages(model, pipe, chunks)


@lru_cache(maxsize=256)
def _shares_of_stages(model: ModelConfig, pipe: int, chunks: int) -> tuple[StageShare, ...]:
    stages = Stages.balanced(model, pipe, chunks)
    last = stages.num_virtual - 1
    return tuple(
        StageShare(
            num_layers=sum(len(stages.blocks[virtual]) for virtual in stages.on(stage)),
            has_first=stages.has_first(stage),
            has_last=stages.has_last(stage),
            forward_sends=sum(virtual < last for virtual in stages.on(stage)),
            backward_sends=sum(virtual > 0 for virtual in stages.on(stage)),
        )
        for stage in range(pipe)
    )
