"""Finds the variants of a job that fit, computing the memory of only a few.

Of two variants, one mostly holds less than the other, except for a little more at single moments.
So if the fullest variant fits with that margin, all fit, and if the emptiest one exceeds the limit
by more than the margin, none does. A job that fits with large micro-batches also fits with smaller
ones, and on more ranks of z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.activations import ModelSizes, kept_of_block, sizes_of, stream_bytes
from axonn_ext.planner.memory.in_flight import units_of
from axonn_ext.planner.memory.peak import fullest, fullest_stages
from axonn_ext.planner.memory.states import FP32, StageStates

_NOTHING_MISSING = 1 << 62  # if all fit
# Properties of a variant that may cost memory, as bit flags.
_KEEPS_ACTIVATIONS, _KEEPS_INPUTS, _KEEPS_WEIGHTS, _OVERLAPS = 1, 2, 4, 8


class Fitting(NamedTuple):
    """Which jobs fit, and the least number of bytes by which any other exceeds the limit."""

    fits: list[bool]
    missing: int


class Roomy(NamedTuple):
    """A job that fits with room to spare: its rows, its ranks of z, and the limit."""

    rows: int
    z: int
    limit: int


class RoomyKinds:
    """Jobs that surely fit, by their similarity and by kinds of variants.

    Jobs with at most as many rows per micro-batch, and at least as many ranks of z, then fit as
    well. All jobs have the same model and batch, and options that differ as in those_that_fit;
    grids, layouts, micro-batches, schedules and AdamW's options may also differ.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: dict[tuple[object, ...], dict[int, Roomy]] = {}

    def like(self, job: Job, stages: Sequence[StageStates]) -> dict[int, Roomy]:
        """Returns the jobs similar to this one by their kinds; the caller adds others to it.

        Jobs that are added must have _rounded_bytes to spare. With more rows, each moment holds at
        least as much, provided that equally many micro-batches are there at a time and messages are
        split alike. Only the bytes subtracted for the part of a block that has not run are rounded
        differently from those they are subtracted from. Where weight gradients are deferred, some
        moments have no micro-batch to subtract them from.

        More ranks of z shard parameters, gradients and AdamW's state further; with one data rank
        fewer gradients are summed. But on CPUs, the copies of two buckets may need more if a bucket
        is smaller, and ZeRO then has fewer data ranks.
        """
        options, grid = job.options, job.grid
        if grid.pipe > 1 and options.pipeline.defers:
            return {}
        in_stages: tuple[object, ...] = ()
        if grid.pipe > 1:
            in_stages = (job.rows % grid.x == 0, *(units_of(job, s.number) for s in stages))
        is_divided = job.updates_in_buckets or self._device == "cpu"
        key = (grid.x, grid.y, grid.pipe, (grid.z, grid.data) if is_divided else grid.z > 1,
               job.placed_model.vocab_size, options.layout, options.optimizer,
               options.pipeline.chunks, options.micro_batches == 1, in_stages)  # fmt: skip
        return self._found.setdefault(key, {})


def those_that_fit(
    jobs: Sequence[Job], limit: int, *, device: str = "cuda", auto_fuses: bool = False,
    known: RoomyKinds | None = None,
) -> Fitting:  # fmt: skip
    """Returns which jobs have a memory_of of at most `limit` bytes.

    jobs: legal jobs that differ only in kept inputs, kept weights, whether there is overlap, and
    whether recomputation is "none" or "full"; all may share another recomputation policy.
    device, auto_fuses: see memory_of. known: earlier results for the same two, to which new ones
    are added.
    """
    stages = fullest_stages(jobs[0], device)
    at_once = max(_states_at_once(jobs[0], stage) for stage in stages)
    if at_once > limit:
        return Fitting([False] * len(jobs), at_once - limit)
    kinds = [_kind(job.options) for job in jobs]
    roomy = {} if known is None else known.like(jobs[0], stages)
    own = Roomy(jobs[0].rows, jobs[0].grid.z, limit)
    fits = [kind in roomy and _holds_less(own, roomy[kind]) for kind in kinds]
    missing = _NOTHING_MISSING
    if all(fits):
        return Fitting(fits, missing)
    size = sizes_of(jobs[0].placed_model)
    comparable, excess = _comparable(jobs[0], stages), _excess(jobs[0])
    counted: list[tuple[int, int]] = []  # (kind, total; or a bound above the limit)
    for number in _order(kinds):
        kind = kinds[number]
        if fits[number]:
            continue
        most = _known_from(counted, kind, limit, comparable, excess)
        if most is None:
            most = _at_least(jobs[number], stages[0], size)
            if most <= limit:
                most = fullest(jobs[number], stages, device, auto_fuses=auto_fuses).total
            counted.append((kind, most))
        fits[number] = most <= limit
        if not fits[number]:
            missing = min(missing, most - limit)
        elif most + _rounded_bytes(size) <= limit:
            roomy[kind] = own
    return Fitting(fits, missing)


def _holds_less(job: Roomy, other: Roomy) -> bool:
    """Whether a job surely fits because a similar one does."""
    return job.rows <= other.rows and job.z >= other.z and job.limit >= other.limit


def _known_from(
    counted: Sequence[tuple[int, int]],
    kind: int,
    limit: int,
    comparable: int,
    excess: Mapping[int, int],
) -> int | None:
    """Returns a bound on a variant's memory, in bytes, or None if there is no useful bound.

    counted: the kinds and the memory of other variants.
    """
    for other, total in counted:
        differ = kind ^ other
        if differ & ~comparable:
            continue
        extra = sum(num_bytes for bit, num_bytes in excess.items() if differ & bit)
        if kind & differ == 0 and total + extra <= limit:
            return total + extra
        if other & differ == 0 and total - extra > limit:
            return total - extra
    return None


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


def _order(kinds: Sequence[int]) -> list[int]:
    """Returns the order in which to check variants: the fullest, the emptiest, the others.

    Variants with overlap and variants without it are not compared with each other.
    """
    order: list[int] = []
    for overlaps in (0, _OVERLAPS):
        those = [n for n, kind in enumerate(kinds) if kind & _OVERLAPS == overlaps]
        those.sort(key=kinds.__getitem__, reverse=True)
        order += (*those[:1], *those[1:][-1:], *those[1:-1])
    return order


def _at_least(job: Job, stage: StageStates, size: ModelSizes) -> int:
    """Returns a lower bound on a rank's memory in bytes: its states, and what its blocks keep."""
    of_block = kept_of_block(job, size)
    # Of a rank's virtual stages, at least the running one keeps its activations.
    chunks = job.options.pipeline.chunks if job.grid.pipe > 1 else 1
    count = stage.share.num_layers // chunks
    again = job.options.recomputation.num_blocks(count)
    blocks = again * of_block.stream + (count - again) * of_block.whole
    return stage.states.parameters + stage.states.optimizer + blocks


def _kind(options: Options) -> int:
    return (
        _KEEPS_ACTIVATIONS * (options.recompute == "none")
        + _KEEPS_INPUTS * options.save_gathered
        + _KEEPS_WEIGHTS * (not options.reshard_after_forward)
        + _OVERLAPS * (options.overlap is not None)
    )


def _comparable(job: Job, stages: Sequence[StageStates]) -> int:
    """Returns the flags of the properties that certainly cost memory, up to _excess.

    With deferred weight gradients, nothing is certain: some moments have no micro-batch in flight
    that could keep less. With one block in a virtual stage, recomputation keeps more, not less.
    """
    pipeline = job.options.pipeline
    if job.grid.pipe > 1 and pipeline.defers:
        return 0
    if any(stage.share.num_layers <= pipeline.chunks for stage in stages):
        return _KEEPS_INPUTS | _KEEPS_WEIGHTS
    return _KEEPS_ACTIVATIONS | _KEEPS_INPUTS | _KEEPS_WEIGHTS


def _excess(job: Job) -> dict[int, int]:
    """Returns, per flag, how many bytes more a variant without it may hold than one with it.

    These are the input of a recomputed block, in addition to what the block then keeps; the input
    of a Linear that is gathered again in backward; and a weight that is gathered again.
    """
    size, (x, y), width = sizes_of(job.placed_model), (job.grid.x, job.grid.y), job.options.width
    gathered_input = job.rows * max(size.hidden // y, size.mlp // x) * width
    gathered_weight = max(size.runs[1], size.vocab * size.hidden) // (x * y) * width
    return {_KEEPS_ACTIVATIONS: stream_bytes(job), _KEEPS_INPUTS: gathered_input,
            _KEEPS_WEIGHTS: gathered_weight}  # fmt: skip


def _rounded_bytes(size: ModelSizes) -> int:
    """Returns how many bytes more a block may hold with fewer rows because of rounding.

    That is one byte for each MLP feature that may be kept.
    """
    return size.up + 3 * size.mlp
