"""Finds the fastest configurations: bounds first, then closed forms, then simulated steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import ZERO_2_IN_STAGES, Job, violations
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.search.choices import (
    fitting_jobs,
    fitting_with_some,
    jobs_of,
    num_variants_of,
    other_pipelines,
    variants_of,
    without_needless,
)
from axonn_ext.planner.search.closed_forms import ClosedForms, Pieces, closed_form_s, least_s
from axonn_ext.planner.search.optimizers import with_each
from axonn_ext.planner.search.overlaps import (
    fastest_overlap,
    is_as_fast,
    is_searched,
    with_default_numbers,
    with_least_numbers,
)
from axonn_ext.planner.search.remedies import NO_MEMORY, nothing_fits
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.search.ways import fastest_way, least_of_ways, simplest_first
from axonn_ext.planner.simulation.pipelines import StageSteps
from axonn_ext.planner.simulation.prepared_step import PreparedStep
from axonn_ext.planner.simulation.simulate import prepare
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.rules import BrokenRule

# Variants of one grid that are simulated. They differ little, and the user asks for a grid.
_VARIANTS_OF_A_GRID = 3
# The most configurations with several stages that are simulated, each with every schedule; one
# simulation takes about 10 ms.
_PIPELINES_SIMULATED = 12
# A candidate is not simulated if closed forms give it more than this many times the step time of
# the last of the best ones. Closed forms hide whatever can be hidden, so a simulated step mostly
# takes longer. Where it was shorter, they were at most 2.5 % above it, or 18 % with several stages,
# where they assume the bubble of equal stages (168 grids for four models). A test checks these
# limits.
SURELY_SLOWER, SURELY_SLOWER_IN_STAGES = 1.06, 1.25
_LEAST_COMPARED = 10  # the size of the set of best grids for this, even if fewer are requested


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    configs         at most `top` configurations, best first, each the best of its grid
    rejected        reason -> the number of configurations rejected for it
    num_considered  the number of all configurations, legal or not; fits: those that are legal and
                    fit. They count the recomputation policies "none" and "full", unless another one
                    is given, and AdamW's options once, which fit if any of them does
    """

    request: Request
    configs: tuple[Estimate, ...]
    rejected: Mapping[str, int]
    num_considered: int
    fits: int


class _Candidate(NamedTuple):
    """A job that fits. least_s: a lower bound of its step time by closed forms.

    A job that recomputes every block would not fit without recomputation, but may fit with less of
    it. least_s then holds for these policies as well, and always for other options of AdamW.
    """

    least_s: float
    job: Job


def plan(request: Request) -> Plan:
    """Finds the fastest configurations, by closed forms and, for the best ones, a simulated step.

    The result depends only on the request. Raises PlannerError, which says what would fit, if
    nothing fits.
    """
    rejected: Counter[str] = Counter()
    found: list[_Candidate] = []
    forms = ClosedForms(request.machine)
    num_considered = num_fitting = 0
    for job in jobs_of(request):
        num_variants = num_variants_of(request, job)
        num_considered += num_variants
        reason = next(violations(job), None)
        if reason is not None:
            rejected[_rule(reason)] += num_variants
            continue
        fitting = fitting_with_some(request, job, variants_of(request, job))
        rejected[NO_MEMORY] += num_variants - len(fitting)
        if fitting:
            found += _candidates(request, forms, without_needless(fitting))
            num_fitting += len(fitting)
    rejected = +rejected  # drops zeros
    if not found:
        raise PlannerError(nothing_fits(request, rejected))
    predictions = _Predictions(request, forms)
    for job in _most_promising(request, found, forms, predictions.needs_not):
        for way in (job, *other_pipelines(request, job)):
            predictions.add(way)
    return Plan(
        request, predictions.best_of_each_grid(), dict(rejected.most_common()),
        num_considered, num_fitting,
    )  # fmt: skip


def _candidates(
    request: Request, forms: ClosedForms, variants: Sequence[Job]
) -> Iterator[_Candidate]:
    """Yields variants of one job, whose blocks take equally long except for repeated gathers."""
    blocks: dict[bool, Pieces] = {}
    for job in variants:
        saves = job.options.save_gathered
        if saves not in blocks:
            blocks[saves] = forms.blocks_of(job)
        bound = least_s if job.options.recompute == "full" else closed_form_s
        least = bound(blocks[saves], job, all_held=is_searched(request, job))
        yield _Candidate(least, job)


class _Predictions:
    """Simulated steps of a request's candidates, and the best of each grid."""

    def __init__(self, request: Request, forms: ClosedForms) -> None:
        self._request, self._forms, self._steps = request, forms, StageSteps(request.machine)
        self._prepared: tuple[Job, PreparedStep] | None = None  # the last one
        self._best: dict[GridShape, Estimate] = {}
        self._count = max(request.top, _LEAST_COMPARED)  # of best grids to keep
        self._worth = math.inf  # the time of the last of the best grids so far

    def needs_not(self, job: Job, seconds: float) -> bool:
        """Whether a job that takes `seconds` by closed forms cannot be among the best grids."""
        factor = SURELY_SLOWER if job.grid.pipe == 1 else SURELY_SLOWER_IN_STAGES
        return seconds > factor * self._worth

    def add(self, job: Job) -> None:
        """Simulates the job, unless it cannot be among the best grids."""
        if self.needs_not(job, self._forms.seconds(job)):
            return
        found = self._fastest(job)
        known = self._best.get(job.grid)
        if known is None or _rank(found) < _rank(known):
            self._best[job.grid] = found
            if len(self._best) >= self._count:
                self._worth = sorted(e.step_time_s for e in self._best.values())[self._count - 1]

    def best_of_each_grid(self) -> tuple[Estimate, ...]:
        """Returns the fastest estimate of each grid, best first, as many as are requested."""
        chosen = sorted(self._best.values(), key=_rank)[: self._count]
        return tuple(sorted(map(self._simplified, chosen), key=_rank)[: self._request.top])

    def _fastest(self, job: Job) -> Estimate:
        if not is_searched(self._request, job):
            return self._predict(job)
        return fastest_overlap(self._request, job, self._predict, worth=self._worth)

    def _simplified(self, found: Estimate) -> Estimate:
        found = self._with_best_optimizer(found)
        if not is_searched(self._request, found.job):
            return found
        return with_least_numbers(self._request, found, self._predict)

    def _with_best_optimizer(self, found: Estimate) -> Estimate:
        """Returns the job with the first of AdamW's options that is as fast as the fastest one.

        The closed forms, which chose among them before, know less about what is hidden.
        """
        request, ways = self._request, []
        for job in with_each(found.job, request.optimizers):
            if job == found.job:
                ways.append(found)
            elif fitting_jobs(request, job, (job.options,)):
                ways.append(self._predict(job))
        least_s = min(way.step_time_s for way in ways)
        return next(way for way in ways if is_as_fast(way, least_s))

    def _predict(self, job: Job) -> Estimate:
        machine = self._request.machine
        memory = memory_on(job, machine)
        if job.grid.pipe > 1:
            return estimate(job, machine, memory, steps=self._steps)
        plain = with_default_numbers(job)
        if self._prepared is None or self._prepared[0] != plain:
            self._prepared = plain, prepare(job, machine)
        return estimate(job, machine, memory, step=self._prepared[1])


def _rank(found: Estimate) -> tuple[object, ...]:
    return (found.step_time_s, *simplest_first(found.job))


def _rule(violation: BrokenRule | str) -> str:
    """Returns the rule without its numbers, by which rejected configurations are counted."""
    what = violation.what if isinstance(violation, BrokenRule) else violation.split(":")[0]
    return what if what == ZERO_2_IN_STAGES else f"{what} not divisible"


class _Time(NamedTuple):
    """The time of candidate `number`, by which candidates are ordered.

    level: 0 for a bound by blocks only, 1 for a bound by the whole step, 2 for the time itself.
    simplicity: see simplest_first.
    """

    seconds: float
    level: int
    simplicity: tuple[object, ...]
    number: int


def _most_promising(
    request: Request,
    found: list[_Candidate],
    forms: ClosedForms,
    needs_not: Callable[[Job, float], bool],
) -> Iterator[Job]:
    """Yields the fastest candidates by closed forms, only a few of each grid.

    needs_not: whether to skip a job that takes at least that many seconds.

    Of candidates that take equally long, the simplest come first, so that ranks agree. A
    candidate's whole closed form, and its fastest open options, are computed only when its bound is
    the smallest one left.
    """
    jobs = [candidate.job for candidate in found]
    num_chosen = num_pipelines = 0
    of_grid: Counter[GridShape] = Counter()
    heap = [_Time(c.least_s, 0, (), i) for i, c in enumerate(found)]
    heapify(heap)
    while heap and num_chosen < request.simulate:
        number = heap[0].number
        job = jobs[number]
        grid = job.grid
        few_pipelines = grid.pipe == 1 or num_pipelines < _PIPELINES_SIMULATED
        is_full = of_grid[grid] == _VARIANTS_OF_A_GRID or not few_pipelines
        # With other schedules than the first, a pipeline may be much faster.
        if is_full or (grid.pipe == 1 and needs_not(job, heap[0].seconds)):
            heappop(heap)
        elif heap[0].level == 0:
            heapreplace(heap, _Time(least_of_ways(request, job, forms), 1, (), number))
        elif heap[0].level == 1:
            job = jobs[number] = fastest_way(request, job, forms)
            heapreplace(heap, _Time(forms.seconds(job), 2, simplest_first(job), number))
        else:
            heappop(heap)
            of_grid[grid] += 1
            num_pipelines += grid.pipe > 1
            num_chosen += 1
            yield job
