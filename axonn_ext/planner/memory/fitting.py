"""Which variants of a job fit, of which only a few are counted.

Of two variants, one mostly holds less than the other; only single moments of it may have a little
more. So if the fullest variant has room for that much, all fit, and if the emptiest one is too full
by more than that, none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.activations import ModelSizes, kept_of_share, sizes_of, stream_bytes
from axonn_ext.planner.memory.peak import fullest, fullest_stages
from axonn_ext.planner.memory.states import FP32, StageStates

_NOTHING_MISSING = 1 << 62  # where all fit
# What a variant has that may take memory, as bits of a number.
_KEEPS_ACTIVATIONS, _KEEPS_INPUTS, _KEEPS_WEIGHTS, _OVERLAPS = 1, 2, 4, 8


class Fitting(NamedTuple):
    """Which jobs fit; and so many bytes, at least, each of the others needs beyond the limit."""

    fits: list[bool]
    missing: int


def those_that_fit(jobs: Sequence[Job], limit: int, *, device: str = "cuda") -> Fitting:
    """Returns which jobs have a memory_of of at most `limit` bytes.

    jobs: legal jobs that differ alone in kept inputs, kept weights, whether there is overlap, and
    whether recomputation is "none" or "full"; all may have another policy of it.
    """
    stages = fullest_stages(jobs[0], device)
    at_once = max(_states_at_once(jobs[0], stage) for stage in stages)
    if at_once > limit:
        return Fitting([False] * len(jobs), at_once - limit)
    size = sizes_of(jobs[0].placed_model)
    comparable, excess = _comparable(jobs[0], stages), _excess(jobs[0])
    kinds = [_kind(job.options) for job in jobs]
    fits, missing = [False] * len(jobs), _NOTHING_MISSING
    counted: list[tuple[int, int]] = []  # (kind, total; or a bound above the limit)
    for number in _order(kinds):
        kind = kinds[number]
        for other, total in counted:
            differ = kind ^ other
            if differ & ~comparable:
                continue
            if kind & differ == 0 and total + excess[differ] <= limit:
                fits[number] = True
                break
            if other & differ == 0 and total - excess[differ] > limit:
                missing = min(missing, total - excess[differ] - limit)
                break
        else:
            total = _at_least(jobs[number], stages[0], size)
            if total <= limit:
                total = fullest(jobs[number], stages, device).total
            counted.append((kind, total))
            fits[number] = total <= limit
            if not fits[number]:
                missing = min(missing, total - limit)
    return Fitting(fits, missing)


def may_fit_without_state(jobs: Sequence[Job], limit: int, *, device: str = "cuda") -> bool:
    """Whether one of the jobs may fit if AdamW's state took no memory; if not, none fits with any.

    jobs: see those_that_fit.
    """
    stage, size = fullest_stages(jobs[0], device)[0], sizes_of(jobs[0].placed_model)
    return any(_at_least(job, stage, size) - stage.states.optimizer <= limit for job in jobs)


def freed_by_offload(job: Job, *, device: str = "cuda") -> int:
    """Returns so many bytes, at most, a rank has less if AdamW's state is elsewhere.

    job: not offloaded. Beside the state, the update in place needs a gradient in fp32, and the
    narrow one that it is made of, of a bucket's part.
    """
    wide = FP32 + (FP32 if job.options.width < FP32 else 0)
    return max(
        stage.states.optimizer + stage.elements.bucket // job.num_parts * wide
        for stage in fullest_stages(job, device)
    )


def _states_at_once(job: Job, stage: StageStates) -> int:
    """Returns the states that are there after backward: of gradients, ZeRO may have only parts."""
    parameters, gradients, optimizer = stage.states
    if job.num_parts > 1:
        gradients = stage.elements.parts * job.options.width
    return parameters + gradients + optimizer


def _order(kinds: Sequence[int]) -> list[int]:
    """Returns the order in which variants are looked at: the fullest, the emptiest, the others.

    Those with overlap, and those without, are not compared with each other.
    """
    order: list[int] = []
    for overlaps in (0, _OVERLAPS):
        those = [n for n, kind in enumerate(kinds) if kind & _OVERLAPS == overlaps]
        those.sort(key=kinds.__getitem__, reverse=True)
        order += (*those[:1], *those[1:][-1:], *those[1:-1])
    return order


def _at_least(job: Job, stage: StageStates, size: ModelSizes) -> int:
    """Returns bytes that a rank of the stage has at once: states, and what its blocks keep."""
    kept = kept_of_share(job, size, stage.share)
    # Of several virtual stages on a rank, at least the one that is running is there.
    chunks = job.options.pipeline.chunks if job.grid.pipe > 1 else 1
    count = stage.share.num_layers // chunks
    blocks = kept.blocks(count, job.options.recomputation.num_blocks(count))
    return stage.states.parameters + stage.states.optimizer + blocks


def _kind(options: Options) -> int:
    return (
        _KEEPS_ACTIVATIONS * (options.recompute == "none")
        + _KEEPS_INPUTS * options.save_gathered
        + _KEEPS_WEIGHTS * (not options.reshard_after_forward)
        + _OVERLAPS * (options.overlap is not None)
    )


def _comparable(job: Job, stages: Sequence[StageStates]) -> int:
    """Returns the bits of what certainly takes memory, up to _excess.

    Of stages whose weight gradients wait, nothing is certain: some moments have no micro-batch in
    flight, of which less could be kept. With one block in a virtual stage, recomputation keeps
    more, not less.
    """
    pipeline = job.options.pipeline
    if job.grid.pipe > 1 and pipeline.defers:
        return 0
    if any(stage.share.num_layers <= pipeline.chunks for stage in stages):
        return _KEEPS_INPUTS | _KEEPS_WEIGHTS
    return _KEEPS_ACTIVATIONS | _KEEPS_INPUTS | _KEEPS_WEIGHTS


def _excess(job: Job) -> list[int]:
    """Returns, by what it does not keep, how many bytes a variant may hold beyond one that does.

    That is the input of a block that is recomputed, beside what it keeps then; the input of a
    Linear that is gathered again in backward; and a weight that is.
    """
    size, (x, y), width = sizes_of(job.placed_model), (job.grid.x, job.grid.y), job.options.width
    gathered_input = job.rows * max(size.hidden // y, size.mlp // x) * width
    gathered_weight = max(size.runs[1], size.vocab * size.hidden) // (x * y) * width
    bytes_of = {_KEEPS_ACTIVATIONS: stream_bytes(job), _KEEPS_INPUTS: gathered_input,
                _KEEPS_WEIGHTS: gathered_weight}  # fmt: skip
    return [sum(b for bit, b in bytes_of.items() if kinds & bit) for kinds in range(8)]
