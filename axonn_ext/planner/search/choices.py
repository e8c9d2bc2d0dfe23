"""The choices of a search: grids, options and schedules, and which of them fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress, islice, product
from typing import NamedTuple

from axonn_ext.planner.job import Job, Options, pipeline_violations
from axonn_ext.planner.memory.activations import deferred_bytes_of
from axonn_ext.planner.memory.fitting import (
    freed_by_offload,
    may_fit_without_state,
    those_that_fit,
)
from axonn_ext.planner.search.optimizers import (
    that_differ_on,
    with_each,
    with_optimizer,
)
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.grid import GridShape, divisors, grids_of
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.recompute import recomputation_of

# The recomputation policies to try, from the least to the most recomputation. Those between the
# first and the last are tried only where the first does not fit.
POLICIES = ("none", "attention", "every:8", "every:4", "every:2", "every:3/4", "full")
# With several stages, the most micro-batches per stage that are tried.
_MOST_PARTS_PER_STAGE = 16


def jobs_of(request: Request) -> Iterator[Job]:
    """Yields a job for every grid, layout and number of micro-batches that the request allows.

    Jobs may be illegal; their other options are the defaults.
    """
    heads = request.fixed.get("heads_over_y")
    most = min(request.max_pipe, request.model.num_layers, request.num_ranks)
    for pipe in (p for p in divisors(request.num_ranks) if p <= most):
        layouts, parts = _choices(request, pipe)
        for grid in grids_of(request.num_ranks, pipe=pipe):
            if not request.axes.allow(grid, request.machine):
                continue
            optimizer = that_differ_on(grid, request.optimizers)[0]
            for layout in layouts:
                for micro_batches in parts:
                    # heads_over_y moves the same number of bytes; it helps where y does not divide
                    # the sequences.
                    sequences = request.batch_size // micro_batches
                    undivided = grid.y > 1 and sequences % (grid.data * grid.z * grid.y) != 0
                    over_y = layout == "sharded" and bool(undivided if heads is None else heads)
                    options = _options(layout, over_y, request.dtype, micro_batches, optimizer)
                    if pipe > 1:
                        options = _with_pipeline(options, _first_pipeline(request.pipelines))
                    yield Job(request.model, grid, options, request.batch_size)


def _choices(request: Request, pipe: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the layouts and numbers of micro-batches to try with that many stages."""
    parts = request.micro_batches or tuple(divisors(request.batch_size))
    if pipe == 1:
        return request.layouts, parts
    layouts = ("sharded",) if "sharded" in request.layouts else request.layouts
    if request.micro_batches is None:
        parts = tuple(n for n in parts if pipe <= n <= _MOST_PARTS_PER_STAGE * pipe)
    return layouts, parts


@cache
def _options(
    layout: str, heads_over_y: bool, dtype: str, micro_batches: int, optimizer: OptimizerOptions
) -> Options:
    return Options(
        layout=layout, heads_over_y=heads_over_y, dtype=dtype, micro_batches=micro_batches,
        optimizer=optimizer,
    )  # fmt: skip


def num_variants_of(request: Request, job: Job) -> int:
    """Returns the number of `variants_of` the job."""
    return len(_values(job.options.sharded, tuple(request.fixed.items()), _splits(job.grid)))


def variants_of(request: Request, job: Job) -> tuple[Options, ...]:
    """Returns all values of the options that change neither legality nor products."""
    variants = _given(job.options, tuple(request.fixed.items()), _splits(job.grid))
    if job.grid.pipe == 1:
        return variants
    first = _first_pipeline(request.pipelines)
    return tuple(_with_pipeline(options, first) for options in variants)


def _first_pipeline(pipelines: tuple[PipelineOptions, ...]) -> PipelineOptions:
    """Returns the schedule to use where only one is tried: 1F1B, which holds least."""
    return next((p for p in pipelines if p.schedule == "1f1b"), pipelines[0])


@cache
def _with_pipeline(options: Options, pipeline: PipelineOptions) -> Options:
    return replace(options, pipeline=pipeline)


def other_pipelines(request: Request, job: Job) -> Iterator[Job]:
    """Yields the job with each other pipeline schedule that fits.

    A schedule that needs more memory comes with the first policy that recomputes more and fits, and
    with the first of AdamW's other options that fit with the job's own policy. If its deferred
    weight gradients need more memory, it also comes with their largest limit that is tried and fits
    with the job's own policy.
    """
    for pipeline in request.pipelines if job.grid.pipe > 1 else ():
        other = replace(job, options=_with_pipeline(job.options, pipeline))
        if pipeline == job.options.pipeline or next(pipeline_violations(other), None) is not None:
            continue
        found = next(_with_policies(request, other, _from(request, job)), None)
        if found is not None:
            yield found
        fits = found is not None and found.options.recompute == job.options.recompute
        if fits:
            continue
        yield from islice(
            (fitting for way in with_each(other, request.optimizers) if way != other
             for fitting in fitting_jobs(request, way, (way.options,))), 1,
        )  # fmt: skip
        limited = pipeline.deferred_bytes or pipeline.schedule != "message_driven"
        if pipeline.defers and not limited:
            yield from islice(_with_limits(request, other), 1)


def _with_limits(request: Request, job: Job) -> Iterator[Job]:
    """Yields a job that defers weight gradients with each limit on them with which it fits.

    The limits are the bytes of some micro-batches on the stage that defers the most.
    """
    of_one = max(deferred_bytes_of(job, stage) for stage in range(job.grid.pipe))
    for count in (job.grid.pipe, max(1, job.grid.pipe // 2), 1):
        pipeline = replace(job.options.pipeline, deferred_bytes=count * of_one)
        yield from fitting_jobs(request, job, (_with_pipeline(job.options, pipeline),))


def with_less_recomputation(request: Request, job: Job) -> tuple[Job, ...]:
    """Returns the job with each recomputation policy that may be its fastest.

    job: fits with every block recomputed, and would not fit without recomputation. Of policies that
    recompute whole blocks, the first one that fits recomputes the fewest.
    """
    if "recompute" in request.fixed:
        return (job,)
    blocks = (p for p in POLICIES if _recomputes_some(p, job))
    of_blocks = islice(_with_policies(request, job, blocks), 1)
    return (*_with_policies(request, job, ("attention",)), *of_blocks) or (job,)


def with_more_recomputation(request: Request, job: Job) -> Iterator[Job]:
    """Yields the job with each policy that recomputes more, whether it fits or not.

    It has the overlap that holds least, so that the memory freed can go to gathered weights.
    """
    for policy in _from(request, job):
        if policy != job.options.recompute:
            options = replace(job.options, recompute=policy, overlap=Overlap())
            yield replace(job, options=options)


def _from(request: Request, job: Job) -> Iterator[str]:
    """Yields the job's recomputation policy, and those that may be tried instead of it."""
    own = job.options.recompute
    yield own
    if "recompute" not in request.fixed:
        more = POLICIES[POLICIES.index(own) + 1 :]
        yield from (p for p in more if _recomputes_some(p, job) or p in ("attention", "full"))


def _recomputes_some(policy: str, job: Job) -> bool:
    """Whether the policy recomputes some, but not all, of the blocks of the largest stage."""
    return 1 < recomputation_of(policy).of <= max(share.num_layers for share in shares_of(job))


def _with_policies(request: Request, job: Job, policies: Iterable[str]) -> Iterator[Job]:
    """Yields the job with each of these recomputation policies with which it fits."""
    for policy in policies:
        yield from fitting_jobs(request, job, (replace(job.options, recompute=policy),))


def without_needless(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs except those that recompute everything although they fit without."""
    roomy = {_beside_recomputation(j.options) for j in jobs if j.options.recompute == "none"}
    return [
        job
        for job in jobs
        if job.options.recompute != "full" or _beside_recomputation(job.options) not in roomy
    ]


def _beside_recomputation(options: Options) -> tuple[bool, ...]:
    """Returns the other options in which variants of one job differ."""
    return options.save_gathered, options.reshard_after_forward, options.overlap is None


class _Splits(NamedTuple):
    """What a grid splits; options that matter only where something is split vary only there."""

    linears: bool
    weights: bool
    batch: bool
    in_stages: bool


def _splits(grid: GridShape) -> _Splits:
    return _Splits(grid.x * grid.y > 1, grid.z > 1, grid.z * grid.data > 1, grid.pipe > 1)


@cache
def _given(
    options: Options, fixed: tuple[tuple[str, object], ...], splits: _Splits
) -> tuple[Options, ...]:
    """Returns all variants of the options that are not fixed."""
    return tuple(
        replace(options, **values)  # type: ignore[arg-type]
        for values in _values(options.sharded, fixed, splits)
    )


@cache
def _values(
    sharded: bool, fixed: tuple[tuple[str, object], ...], splits: _Splits
) -> tuple[dict[str, object], ...]:
    """Returns the values of the options in which variants of a job differ."""
    choices: dict[str, tuple[object, ...]] = {
        "recompute": ("none", "full"),
        "save_gathered": (False, True) if sharded and splits.linears else (False,),
        "overlap": (Overlap(), None) if splits.batch else (None,),
        "reshard_after_forward": (True, False) if splits.weights else (True,),
    }
    if splits.in_stages:  # fewer, to keep the search short
        of_overlap: tuple[object, ...] = (Overlap(),) if splits.batch else (None,)
        choices |= {"save_gathered": (False,), "overlap": of_overlap,
                    "reshard_after_forward": (True,)}  # fmt: skip
    given = {name: (value,) for name, value in fixed if name in choices}
    if given.get("overlap") == ("on",):
        given["overlap"] = (Overlap(),)  # its numbers are found later
    choices.update(given)
    variants = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return tuple(
        v
        for v in variants
        # With overlap, the budget of gathered bytes decides instead of reshard_after_forward.
        if v["overlap"] is None
        or v["reshard_after_forward"]
        or "reshard_after_forward" in dict(fixed)
    )


def fitting_with_some(
    request: Request,
    job: Job,
    variants: tuple[Options, ...],
) -> list[Job]:
    """Returns the variants of a job that fit, each with the first options of AdamW that do."""
    limit, device = request.memory_limit_on(job.grid, *variants), request.machine.device
    found: list[Job] = []
    left = [_with_options(job, options) for options in variants]
    missing: dict[int, int] = {}  # zero -> the fewest bytes by which a variant does not fit
    for optimizer in that_differ_on(job.grid, request.optimizers):
        if missing and not may_fit_without_state(left, limit, device=device):
            break
        if optimizer.offload != "none" and optimizer.zero in missing:
            kept = with_optimizer(left[0], replace(optimizer, offload="none"))
            if missing[optimizer.zero] > freed_by_offload(kept, device=device):
                continue
        tried = [with_optimizer(j, optimizer) for j in left]
        fits, lacking = those_that_fit(
            tried, limit, device=device, auto_fuses=request.machine.auto_fuses
        )
        found += compress(tried, fits)
        left = [j for j, fit in zip(left, fits, strict=True) if not fit]
        if not left:
            break
        if optimizer.offload == "none":
            missing[optimizer.zero] = lacking
    return found


def fitting_jobs(request: Request, job: Job, variants: tuple[Options, ...]) -> list[Job]:
    """Returns the variants of a job that fit; see those_that_fit."""
    jobs = [_with_options(job, options) for options in variants]
    limit, machine = request.memory_limit_on(job.grid, *variants), request.machine
    found = those_that_fit(jobs, limit, device=machine.device, auto_fuses=machine.auto_fuses)
    return list(compress(jobs, found.fits))


def _with_options(job: Job, options: Options) -> Job:
    return Job(job.model, job.grid, options, job.batch_size)
