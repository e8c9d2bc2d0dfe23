"""Finds the variants of a job that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.activations import ModelSizes, kept_of_block, sizes_of
from axonn_ext.planner.memory.peak import fullest, fullest_stages
from axonn_ext.planner.memory.states import FP32, StageStates

_NOTHING_MISSING = 1 << 62  # if all fit


class Fitting(NamedTuple):
    """Which jobs fit, and the least number of bytes by which any other exceeds the limit."""

    fits: list[bool]
    missing: int


def those_that_fit(
    jobs: Sequence[Job], limit: int, *, device: str = "cuda", auto_fuses: bool = False
) -> Fitting:
    """Returns which jobs have a memory_of of at most `limit` bytes.

    jobs: legal jobs that differ only in kept inputs, kept weights, overlap and recomputation.
    device, auto_fuses: see memory_of.
    """
    stages = fullest_stages(jobs[0], device)
    at_once = max(_states_at_once(jobs[0], stage) for stage in stages)
    if at_once > limit:
        return Fitting([False] * len(jobs), at_once - limit)
    size, excess = sizes_of(jobs[0].placed_model), list[int]()
    for job in jobs:
        most = _at_least(job, stages[0], size)
        if most <= limit:
            most = fullest(job, stages, device, auto_fuses=auto_fuses).total
        excess.append(most - limit)
    missing = min((number for number in excess if number > 0), default=_NOTHING_MISSING)
    return Fitting([number <= 0 for number in excess], missing)


def may_fit_without_state(jobs: Sequence[Job], limit: int, *, device: str = "cuda") -> bool:
    """Whether any of the jobs may fit if AdamW's state takes no memory; if not, none fits at all.

    jobs: see those_that_fit.
    """
    stage, size = fullest_stages(jobs[0], device)[0], sizes_of(jobs[0].placed_model)
    return any(_at_least(job, stage, size) - stage.states.optimizer <= limit for job in jobs)


def freed_by_offload(job: Job, *, device: str = "cuda") -> int:
    """Returns the largest number of bytes per rank that offloading AdamW's state may free.

    job: not offloaded. In addition to the state, its update needs a bucket shard's gradient in fp32
    and the narrow one from which that is computed.
    """
    wide = FP32 + (FP32 if job.options.width < FP32 else 0)
    return max(
        stage.states.optimizer + stage.elements.bucket // job.num_parts * wide
        for stage in fullest_stages(job, device)
    )


def _states_at_once(job: Job, stage: StageStates) -> int:
    """Returns the bytes of all states after backward; ZeRO may hold only shards of gradients."""
    parameters, gradients, optimizer = stage.states
    if job.num_parts > 1:
        gradients = stage.elements.parts * job.options.width
    return parameters + gradients + optimizer


def _at_least(job: Job, stage: StageStates, size: ModelSizes) -> int:
    """Returns a lower bound on a rank's memory in bytes: its states, and what its blocks keep."""
    of_block = kept_of_block(job, size)
    # Of a rank's virtual stages, at least the running one keeps its activations.
    chunks = job.options.pipeline.chunks if job.grid.pipe > 1 else 1
    count = stage.share.num_layers // chunks
    again = job.options.recomputation.num_blocks(count)
    blocks = again * of_block.stream + (count - again) * of_block.whole
    return stage.states.parameters + stage.states.optimizer + blocks
