"""Which variants of a job fit, of which only a few are counted.

Of two variants, one mostly holds less than the other; only single moments of it may have a little
more. So if the fullest variant has room for that much, all fit, and if the emptiest one is too full
by more than that, none does. And what fits with large micro-batches fits with smaller ones, and on
more ranks of z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.activations import ModelSizes, kept_of_block, sizes_of, stream_bytes
from axonn_ext.planner.memory.in_flight import units_of
from axonn_ext.planner.memory.peak import fullest, fullest_stages
from axonn_ext.planner.memory.states import FP32, StageStates

_NOTHING_MISSING = 1 << 62  # where all fit
# What a variant has that may take memory, as bits of a number.
_KEEPS_ACTIVATIONS, _KEEPS_INPUTS, _KEEPS_WEIGHTS, _OVERLAPS = 1, 2, 4, 8


class Fitting(NamedTuple):
    """Which jobs fit; and so many bytes, at least, each of the others needs beyond the limit."""

    fits: list[bool]
    missing: int


class Roomy(NamedTuple):
    """A job that fits with room to spare: its rows, its ranks of z, and the limit."""

    rows: int
    z: int
    limit: int


class RoomyKinds:
    """Jobs that surely fit, by what they are like and by kinds of variants.

    Those fit, too, that have fewer rows in a micro-batch and more ranks of z. All jobs have one
    model and batch, and options that differ as those of those_that_fit; grids, layouts,
    micro-batches, schedules and AdamW's options may differ, too.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: dict[tuple[object, ...], dict[int, Roomy]] = {}

    def like(self, job: Job, stages: Sequence[StageStates]) -> dict[int, Roomy]:
        """Returns those like the job by their kinds, to which others are to be added.

        These must have _rounded_bytes to spare. Each moment holds at least as much if there are
        more rows, provided that as many micro-batches are there at a time and messages are cut
        alike. Only what is subtracted for a part of a block that has not run is rounded otherwise
        than what it is subtracted from. Where weight gradients wait, some moments have no
        micro-batch of which it could be subtracted.

        More ranks of z divide parameters, gradients and the state of AdamW, and with one rank of
        data fewer gradients are summed. But on CPUs, the copies of two buckets may need more if a
        bucket is smaller, and ZeRO has fewer ranks of data then.
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

    jobs: legal jobs that differ alone in kept inputs, kept weights, whether there is overlap, and
    whether recomputation is "none" or "full"; all may have another policy of it.
    device, auto_fuses: see memory_of. known: what has been found with the same two, to which what
    is found is added.
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
    """Whether a job surely fits because another one does, which is like it."""
    return job.rows <= other.rows and job.z >= other.z and job.limit >= other.limit


def _known_from(
    counted: Sequence[tuple[int, int]],
    kind: int,
    limit: int,
    comparable: int,
    excess: Mapping[int, int],
) -> int | None:
    """Returns a bound on a variant's memory, in bytes, or None if there is no useful bound.

    counted: the kinds of other variants, and what they hold.
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
    of_block = kept_of_block(job, size)
    # Of several virtual stages on a rank, at least the one that is running is there.
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


def _excess(job: Job) -> dict[int, int]:
    """Returns how many bytes a variant may hold beyond one that keeps a thing which it does not.

    That is the input of a block that is recomputed, beside what it keeps then; the input of a
    Linear that is gathered again in backward; and a weight that is.
    """
    size, (x, y), width = sizes_of(job.placed_model), (job.grid.x, job.grid.y), job.options.width
    gathered_input = job.rows * max(size.hidden // y, size.mlp // x) * width
    gathered_weight = max(size.runs[1], size.vocab * size.hidden) // (x * y) * width
    return {_KEEPS_ACTIVATIONS: stream_bytes(job), _KEEPS_INPUTS: gathered_input,
            _KEEPS_WEIGHTS: gathered_weight}  # fmt: skip


def _rounded_bytes(size: ModelSizes) -> int:
    """Returns by how much rounding may make a block hold more with fewer rows.

    That is one byte for each feature of an MLP that may be kept.
    """
    return size.up + 3 * size.mlp
