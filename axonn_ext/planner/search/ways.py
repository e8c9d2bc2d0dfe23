"""Finds, by closed forms, the options with which a search's candidate runs fastest.

Open options are the recomputation policy, the budget of gathered weights, and AdamW's options.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_ext.planner.job import Job
from axonn_ext.planner.search.choices import (
    fitting_jobs,
    with_less_recomputation,
    with_more_recomputation,
)
from axonn_ext.planner.search.closed_forms import ClosedForms
from axonn_ext.planner.search.optimizers import with_each
from axonn_ext.planner.search.overlaps import is_searched, with_most_held
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.pipeline import SCHEDULES


def simplest_first(job: Job) -> tuple[object, ...]:
    """Returns a sort key for jobs that take equally long: the smallest numbers come first."""
    options, overlap = job.options, job.options.overlap
    again, optimizer = options.recomputation, options.optimizer
    return (
        again.share_of_blocks, again.attention, options.save_gathered,
        not options.reshard_after_forward, options.heads_over_y, options.layout != "sharded",
        options.micro_batches, optimizer.offload != "none", optimizer.zero, job.grid,
        SCHEDULES.index(options.pipeline.schedule), options.pipeline.chunks,
        options.pipeline.defer_weights, options.pipeline.deferred_bytes,
        *((overlap.prefetch, overlap.deferred, overlap.gathered_bytes) if overlap else ()),
    )  # fmt: skip


def fastest_way(request: Request, job: Job, forms: ClosedForms) -> Job:
    """Returns the job with its fastest recomputation policy, budget of gathered weights and options
    of AdamW, by whole closed forms.

    job: fits as it is. If it recomputes every block, it would not fit without recomputation.
    """
    ways = _Ways(request, forms)
    best = ways.with_own_optimizer(job)
    assert best is not None, "a candidate fits with its own options"
    for way in with_each(job, request.optimizers):
        if way != job and _least_s(request, way, forms) <= forms.seconds(best):
            other = ways.with_own_optimizer(way)
            best = best if other is None else min(best, other, key=ways.rank)
    return best


def least_of_ways(request: Request, job: Job, forms: ClosedForms) -> float:
    """Returns a lower bound of the time of the job's fastest_way."""
    return min(_least_s(request, way, forms) for way in with_each(job, request.optimizers))


def _least_s(request: Request, job: Job, forms: ClosedForms) -> float:
    """Returns a lower bound of the job's time with its own options of AdamW."""
    return forms.least_seconds(job, all_held=is_searched(request, job))


class _Ways:
    """Looks for the fastest ways, among those that fit, to run a job."""

    def __init__(self, request: Request, forms: ClosedForms) -> None:
        self._request, self._forms = request, forms

    def rank(self, way: Job) -> tuple[object, ...]:
        """Returns the sort key of a way: its time, then its simplicity."""
        return self._forms.seconds(way), *simplest_first(way)

    def with_own_optimizer(self, job: Job) -> Job | None:
        """Returns the fastest way that has the job's options of AdamW; None if none fits."""
        request, forms = self._request, self._forms
        ways = self._policies(job)
        if not ways or not is_searched(request, job):
            return min(ways, key=self.rank, default=None)
        best = min((with_most_held(request, way) for way in ways), key=self.rank)
        # Recomputing more can only help if more weights can then be held.
        for way in with_more_recomputation(request, best):
            if forms.seconds(way, all_held=True) >= forms.seconds(best):
                continue
            for fitting in fitting_jobs(request, way, (way.options,)):
                best = min(best, with_most_held(request, fitting), key=self.rank)
        return best

    def _policies(self, job: Job) -> tuple[Job, ...]:
        """Returns the job with each recomputation policy that fits and may be its fastest.

        If not even the job's own policy fits, policies that recompute more are tried.
        """
        request, options = self._request, job.options
        fitting = tuple(fitting_jobs(request, job, (options,)))
        if not fitting and options.recompute != "full" and "recompute" not in request.fixed:
            options = replace(options, recompute="full")
            fitting = tuple(fitting_jobs(request, job, (options,)))
        if options.recompute != "full":
            return fitting
        return with_less_recomputation(request, fitting[0]) if fitting else ()
