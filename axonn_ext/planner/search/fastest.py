"""Finds the fastest configurations: bounds first, then closed forms, then simulated steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from axonn_ext.planner.closed_forms import ClosedForms, Pieces, closed_form_s, least_s
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import ZERO_2_IN_STAGES, Job, violations
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.pipelines import StageSteps
from axonn_ext.planner.search.choices import (
    fitting_jobs,
    jobs_of,
    other_pipelines,
    variants_of,
    with_less_recomputation,
    without_needless,
)
from axonn_ext.planner.search.remedies import NO_MEMORY, VOCABULARY, nothing_fits, padding_hint
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.rules import BrokenRule

# So many variants of one grid are simulated. They differ little, and the user asks for a grid.
_VARIANTS_OF_A_GRID = 3
# So many configurations with several stages are simulated at most, each with every schedule; one
# simulation takes about 10 ms.
_PIPELINES_SIMULATED = 12


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    configs         at most `top` configurations, the best first, each the best of its grid
    rejected        reason -> the number of configurations rejected for it
    num_considered  the number of all configurations, legal or not; fits: those that are legal and
                    fit. Of policies of recomputation, these count "none" and "full", unless another
                    one is given
    """

    request: Request
    configs: tuple[Estimate, ...]
    rejected: Mapping[str, int]
    num_considered: int
    fits: int


class _Candidate(NamedTuple):
    """A job that fits. least_s: the seconds that a step of it takes at least by closed forms.

    If the job recomputes every block, it would not fit if it recomputed nothing. It may then fit
    with less recomputation, for which least_s holds, too.
    """

    least_s: float
    job: Job


def plan(request: Request) -> Plan:
    """Finds the fastest configurations, by closed forms and, for the best ones, a simulated step.

    The result depends on the request alone. Raises PlannerError, which says what would fit, if
    nothing fits.
    """
    rejected: Counter[str] = Counter()
    found: list[_Candidate] = []
    forms = ClosedForms(request.machine)
    num_considered = num_fitting = 0
    for job in jobs_of(request):
        options = variants_of(request, job)
        num_considered += len(options)
        reason = next(violations(job), None)
        if reason is not None:
            rejected[_rule(reason)] += len(options)
            continue
        fitting = fitting_jobs(request, job, options)
        rejected[NO_MEMORY] += len(options) - len(fitting)
        if fitting:
            found += [_candidate(forms.blocks_of(v), v) for v in without_needless(fitting)]
            num_fitting += len(fitting)
    rejected = +rejected  # drops zeros
    if VOCABULARY in rejected:
        rejected[padding_hint(request)] = rejected.pop(VOCABULARY)
    if not found:
        raise PlannerError(nothing_fits(request, rejected))
    promising = _most_promising(request, found, forms)
    promising += [other for job in promising for other in other_pipelines(request, job)]
    steps = StageSteps(request.machine)
    best = [_estimate(request, job, steps) for job in promising]
    return Plan(
        request, _best_of_each_grid(best)[: request.top], dict(rejected.most_common()),
        num_considered, num_fitting,
    )  # fmt: skip


def _candidate(blocks: Pieces, job: Job) -> _Candidate:
    bound = least_s if job.options.recompute == "full" else closed_form_s
    return _Candidate(bound(blocks, job), job)


def _estimate(request: Request, job: Job, steps: StageSteps) -> Estimate:
    memory = memory_of(job, device=request.machine.device)
    return estimate(job, request.machine, memory, steps=steps)


def _rule(violation: BrokenRule | str) -> str:
    """Returns the rule without its numbers, by which rejected configurations are counted."""
    what = violation.what if isinstance(violation, BrokenRule) else violation.split(":")[0]
    return what if what == ZERO_2_IN_STAGES else f"{what} not divisible"


class _Time(NamedTuple):
    """The time of candidate `number` in the order in which candidates are looked at.

    is_whole: whether it is the whole time, and not only a bound. simplicity: see _simplest_first.
    """

    seconds: float
    is_whole: bool
    simplicity: tuple[object, ...]
    number: int


def _most_promising(request: Request, found: list[_Candidate], forms: ClosedForms) -> list[Job]:
    """Returns the fastest candidates by closed forms, only a few of each grid.

    Of candidates that take equally long, the simplest come first, so that ranks agree. The whole
    closed form of a candidate is computed only when its bound is the least of what is left. Only
    then is looked for the policy of recomputation with which it is fastest.
    """
    jobs = [candidate.job for candidate in found]
    chosen: list[Job] = []
    of_grid: Counter[GridShape] = Counter()
    num_pipelines = 0
    heap = [_Time(c.least_s, False, (), i) for i, c in enumerate(found)]
    heapify(heap)
    while heap and len(chosen) < request.simulate:
        number = heap[0].number
        job = jobs[number]
        grid = job.grid
        few_pipelines = grid.pipe == 1 or num_pipelines < _PIPELINES_SIMULATED
        if of_grid[grid] == _VARIANTS_OF_A_GRID or not few_pipelines:
            heappop(heap)
        elif not heap[0].is_whole:
            if job.options.recompute == "full":
                job = jobs[number] = _with_fastest_policy(request, job, forms)
            whole = _Time(forms.seconds(job), True, _simplest_first(job), number)
            heapreplace(heap, whole)
        else:
            heappop(heap)
            of_grid[grid] += 1
            num_pipelines += grid.pipe > 1
            chosen.append(job)
    return chosen


def _with_fastest_policy(request: Request, job: Job, forms: ClosedForms) -> Job:
    """Returns a job that recomputes every block with the policy with which it is fastest."""
    ways = with_less_recomputation(request, job)
    return min(ways, key=lambda way: (forms.seconds(way), _simplest_first(way)))


def _simplest_first(job: Job) -> tuple[object, ...]:
    options = job.options
    again = options.recomputation
    return (
        again.share_of_blocks, again.attention, options.save_gathered,
        not options.reshard_after_forward, options.heads_over_y, options.layout != "sharded",
        options.micro_batches, job.grid,
        SCHEDULES.index(options.pipeline.schedule), options.pipeline.chunks,
    )  # fmt: skip


def _best_of_each_grid(estimates: list[Estimate]) -> tuple[Estimate, ...]:
    best: dict[GridShape, Estimate] = {}
    for e in sorted(estimates, key=lambda e: (e.step_time_s, *_simplest_first(e.job))):
        best.setdefault(e.job.grid, e)
    return tuple(best.values())
