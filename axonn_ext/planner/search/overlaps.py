"""Chooses the numbers of Overlap: weights gathered ahead and held, and sums that may be under way.

Holding more weights is never slower in the model, but takes memory. So the search looks for the
largest budget that fits, with each number of sums under way and of weights ahead. Larger values of
these two are not always faster: an early gather can delay a sum for which computation waits. In the
end, the search takes the smallest numbers that are nearly as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.kept_weights import block_bytes, table_bytes
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.parallel import Overlap

PREFETCHES, DEFERRED = (1, 2, 4, 8), (2, 4, 8)
_MIB = 1 << 20
_EQUAL = 1e-3  # see is_as_fast
# If computation waits for z for a smaller share of the step, there is nothing to gain.
_NO_WAIT = 1e-3


def is_searched(request: Request, job: Job) -> bool:
    """Whether the numbers of the job's overlap are to be searched, and matter."""
    given = isinstance(request.fixed.get("overlap"), Overlap)
    return not given and job.options.overlap is not None and job.grid.z > 1


def is_as_fast(found: Estimate, step_time_s: float) -> bool:
    """Whether a step takes at most 0.1 % longer, which is below the model's accuracy."""
    return found.step_time_s <= step_time_s * (1 + _EQUAL)


def with_default_numbers(job: Job) -> Job:
    """Returns the job with the defaults of all numbers that are searched."""
    if job.options.overlap is None:
        return job
    return _with(
        job, prefetch=Overlap.prefetch, gathered_bytes=Overlap.gathered_bytes,
        deferred=Overlap.deferred,
    )  # fmt: skip


def with_most_held(request: Request, job: Job) -> Job:
    """Returns the job with the largest budget of gathered weights that fits, in whole MiB.

    job: fits as it is.
    """
    overlap = job.options.overlap
    assert overlap is not None
    most = max(overlap.gathered_bytes, _all_weights(job))
    limit = request.memory_limit_on(job.grid, job.options)
    budget = overlap.gathered_bytes
    # A byte of budget costs at most a byte of memory. If less, the second pass uses the rest.
    for _ in range(2):
        room = limit - _total(request, _with(job, gathered_bytes=budget))
        wider = min(most, (budget + max(0, room)) // _MIB * _MIB)
        if wider <= budget:
            break
        budget = wider
    whole = _with(job, gathered_bytes=most)
    if budget < most and _total(request, whole) <= limit:
        return whole
    return _with(job, gathered_bytes=budget)


def fastest_overlap(
    request: Request, job: Job, predict: Callable[[Job], Estimate], *, worth: float
) -> Estimate:
    """Returns the job with the fastest overlap numbers that are tried, by simulated steps.

    job: fits with the numbers that it has. worth: a step time; if no numbers can reach it, not all
    are tried.
    """
    limit = request.memory_limit_on(job.grid, job.options)
    least = _with(job, gathered_bytes=Overlap.gathered_bytes, deferred=DEFERRED[0])
    if _total(request, least) > limit:
        least = job
    best: Estimate | None = None
    settled: set[tuple[int, int]] = set()  # choices that more sums under way do not change
    for deferred in DEFERRED:
        way = _with(least, deferred=deferred)
        if _total(request, way) > limit:
            break
        way = with_most_held(request, way)
        assert way.options.overlap is not None
        for prefetch in reversed(PREFETCHES):
            numbers = prefetch, way.options.overlap.gathered_bytes
            if numbers in settled:
                continue
            found = predict(_with(way, prefetch=prefetch))
            if not found.deferred_binds:
                settled.add(numbers)
            if best is None or found.step_time_s < best.step_time_s:
                best = found
            waits = best.exposed_s.get("z", 0.0)
            if waits < _NO_WAIT * best.step_time_s or best.step_time_s - waits > worth:
                return best
    return predict(job) if best is None else best


def with_least_numbers(
    request: Request, best: Estimate, predict: Callable[[Job], Estimate]
) -> Estimate:
    """Returns the job with the smallest overlap numbers that are as fast, within 0.1 %."""
    chosen = best
    for name in ("prefetch", "deferred", "gathered_bytes"):
        for value in _smaller(name, chosen.job):
            found = predict(_with(chosen.job, **{name: value}))
            limit = request.memory_limit_on(found.job.grid, found.job.options)
            fits = found.memory.total <= limit
            if fits and is_as_fast(found, best.step_time_s):
                chosen = found
                break
    return chosen


def _smaller(name: str, job: Job) -> Iterator[int]:
    """Yields the tried values of an option that are below the job's, in ascending order."""
    own = getattr(job.options.overlap, name)
    if name == "gathered_bytes":
        value = Overlap.gathered_bytes
        while value < own:
            yield value
            value *= 2
        if _all_weights(job) < own:
            yield _all_weights(job)
        return
    yield from (value for value in (PREFETCHES if name == "prefetch" else DEFERRED) if value < own)


def _all_weights(job: Job) -> int:
    """Returns the bytes, in whole MiB, of all weights of the fullest rank, gathered over z."""
    shares = shares_of(job)
    layers = max(share.num_layers for share in shares)
    tables = 2 if job.grid.pipe == 1 and not job.model.tie_embeddings else 1
    num_bytes = layers * block_bytes(job) + tables * table_bytes(job)
    return -(-int(num_bytes) // _MIB) * _MIB


def _total(request: Request, job: Job) -> int:
    return memory_on(job, request.machine).total


def _with(job: Job, **numbers: int) -> Job:
    options = _changed(job.options, tuple(numbers.items()))
    return Job(job.model, job.grid, options, job.batch_size)


@lru_cache(maxsize=4096)
def _changed(options: Options, numbers: tuple[tuple[str, int], ...]) -> Options:
    assert options.overlap is not None
    overlap = replace(options.overlap, **dict(numbers))  # type: ignore[arg-type]
    return replace(options, overlap=overlap)
