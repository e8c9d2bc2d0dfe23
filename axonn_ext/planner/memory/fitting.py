"""Which variants of a job fit, of which only a few are counted.

Of two variants, one mostly holds less than the other; only single moments of it may have a little
more. So if the fullest variant has room for that much, all fit, and if the emptiest one is too full
by more than that, none does.
"""

from __future__ import annotations

from collections.abc import Sequence

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.activations import sizes_of, stream_bytes
from axonn_ext.planner.memory.peak import fullest, fullest_stages
from axonn_ext.planner.memory.states import StageStates

# What a variant has that may take memory, as bits of a number.
_KEEPS_ACTIVATIONS, _KEEPS_INPUTS, _KEEPS_WEIGHTS, _OVERLAPS = 1, 2, 4, 8


def those_that_fit(jobs: Sequence[Job], limit: int, *, device: str = "cuda") -> list[Job]:
    """Returns the jobs whose memory_of is at most `limit` bytes.

    jobs: legal jobs that differ alone in recomputation, kept inputs, kept weights and whether there
    is overlap.
    """
    stages = fullest_stages(jobs[0])
    if max(sum(stage.states) for stage in stages) > limit:  # after backward, all of it is there
        return []
    comparable, excess = _comparable(jobs[0], stages), _most_excess(jobs[0])
    kinds = [_kind(job.options) for job in jobs]
    by_size = sorted(range(len(jobs)), key=kinds.__getitem__)
    fits = [False] * len(jobs)
    counted: list[tuple[int, int]] = []  # (kind, total)
    for number in (by_size[-1], *by_size[:-1]):
        kind = kinds[number]
        for other, total in counted:
            if (kind ^ other) & ~comparable:
                continue
            if kind & ~other == 0 and total + excess <= limit:
                fits[number] = True
                break
            if other & ~kind == 0 and total - excess > limit:
                break
        else:
            total = fullest(jobs[number], stages, device).total
            counted.append((kind, total))
            fits[number] = total <= limit
    return [job for job, fit in zip(jobs, fits, strict=True) if fit]


def _kind(options: Options) -> int:
    return (
        _KEEPS_ACTIVATIONS * (not options.recompute)
        + _KEEPS_INPUTS * options.save_gathered
        + _KEEPS_WEIGHTS * (not options.reshard_after_forward)
        + _OVERLAPS * (options.overlap is not None)
    )


def _comparable(job: Job, stages: Sequence[StageStates]) -> int:
    """Returns the bits of what certainly takes memory, up to _most_excess.

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


def _most_excess(job: Job) -> int:
    """Returns by how many bytes a variant may exceed one that keeps more.

    That is the input of a block that is recomputed, beside what it keeps then; the input of a
    Linear that is gathered again in backward; and a weight that is.
    """
    size, (x, y), width = sizes_of(job.model), (job.grid.x, job.grid.y), job.options.width
    gathered_input = job.rows * max(size.hidden // y, size.mlp // x) * width
    gathered_weight = max(size.runs[1], size.vocab * size.hidden) // (x * y) * width
    return stream_bytes(job) + gathered_input + gathered_weight
