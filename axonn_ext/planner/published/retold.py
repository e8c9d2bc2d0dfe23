"""Studies retold: each step as its source ran it and as the planner would, next to the figures.

All times are modelled; none was measured here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import Job, Options, violations
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.machines.scaled_links import CHANGE, with_rates
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.published.cases import Case, estimate_case
from axonn_ext.planner.published.runs import FLOPS
from axonn_ext.planner.published.study import Figure, Row, Study, Way
from axonn_ext.planner.search.closed_forms import ClosedForms
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.simulation.pipelines import StageSteps
from axonn_ext.spec.grid import GridShape, divisors, grids_of
from axonn_ext.spec.optimizer import OptimizerOptions

_SIMULATED = 12  # number of a framework's possible steps that are simulated


@dataclass(frozen=True)
class Told:
    """A row retold. theirs: as its source ran it; best: the planner's proposal; frameworks: by key.

    A prediction is None if nothing fits.
    """

    row: Row
    machine: Machine
    theirs: Estimate | None
    best: Estimate | None
    frameworks: Mapping[str, Estimate | None]

    @property
    def too_large(self) -> bool:
        """Whether the source's step is predicted to need more memory than its GPUs have."""
        return self.theirs is not None and self.theirs.memory.total > self.machine.usable_bytes


@dataclass(frozen=True)
class Line:
    """A reported figure next to the modelled ones, in the figure's unit.

    efficiency, best_efficiency: the shares of peak relative to those of the machine's first row.
    """

    told: Told
    figure: Figure
    theirs: float | None
    best: float | None
    efficiency: float | None
    best_efficiency: float | None

    @property
    def error(self) -> float | None:
        """The error of `theirs` relative to the figure, or to the nearer end of its range.

        It is 0 inside a range. For "faster", it is the error of the ratio of the two times.
        """
        if self.theirs is None or self.figure.reported is None:
            return None
        low, high = self.figure.reported
        nearest = min(max(self.theirs, low), high)
        one = 1.0 if self.figure.kind == "faster" else 0.0
        return (one + self.theirs) / (one + nearest) - 1


def retell(study: Study) -> tuple[Told, ...]:
    """Predicts all rows of a study; equal steps are predicted once."""

    @functools.cache
    def as_it_ran(case: Case, way: Way) -> Estimate | None:
        return _as_it_ran(case, way, study.machines[case.machine])

    @functools.cache
    def best(case: Case) -> Estimate | None:
        return _planned(case, study.machines[case.machine], most_stages=study.most_stages)

    return tuple(
        Told(
            row, study.machines[row.case.machine], as_it_ran(row.case, row.way),
            best(_model_and_gpus(row.case)),
            {key: as_it_ran(case, way) for key, (case, way) in row.frameworks.items()},
        )
        for row in study.rows
    )  # fmt: skip


def lines_of(told: Sequence[Told]) -> Iterator[Line]:
    """Yields every figure of every row."""
    first: dict[str, Told] = {}
    for t in told:
        base = first.setdefault(t.row.case.machine, t)
        for figure in t.row.figures:
            efficiency = _efficiency(figure, t, t.theirs, base, base.theirs)
            best_efficiency = _efficiency(figure, t, t.best, base, base.best)
            yield Line(
                t, figure, _value(figure, t, t.theirs, efficiency),
                _value(figure, t, t.best, best_efficiency), efficiency, best_efficiency,
            )  # fmt: skip


def mean_error(lines: Iterable[Line]) -> tuple[float, int]:
    """Returns the mean absolute error of figures that the planner can match, and their number.

    If there are none, the mean is 0.
    """
    errors = [abs(line.error) for line in lines if line.error is not None and not line.figure.apart]
    return math.fsum(errors) / max(1, len(errors)), len(errors)


def share_of_peak(told: Told, step: Estimate, flops: str) -> float:
    """Returns the operations of a step, counted by this rule, over peak times its seconds."""
    case = told.row.case
    peak = told.machine.peak_flops[case.options.dtype]
    return _flops_per_s_and_gpu(case, step, flops) / peak


def _flops_per_s_and_gpu(case: Case, step: Estimate, flops: str) -> float:
    return FLOPS[flops](case.model, case.batch_size) / step.step_time_s / case.num_ranks


def _efficiency(
    figure: Figure, told: Told, step: Estimate | None, first: Told, of_first: Estimate | None
) -> float | None:
    if step is None or of_first is None:
        return None
    return share_of_peak(told, step, figure.flops) / share_of_peak(first, of_first, figure.flops)


def _value(
    figure: Figure, told: Told, step: Estimate | None, efficiency: float | None
) -> float | None:
    """Returns the modelled value in the figure's unit."""
    if step is None:
        return None
    this = told.row.case
    match figure.kind:
        case "share_of_peak":
            return share_of_peak(told, step, figure.flops)
        case "tflops_per_gpu":
            return _flops_per_s_and_gpu(this, step, figure.flops) / 1e12
        case "tokens_per_s_per_gpu":
            return step.tokens_per_s / this.num_ranks
        case "efficiency":
            return efficiency
    framework = told.frameworks[figure.than]
    return None if framework is None else framework.step_time_s / step.step_time_s - 1


def range_of_network(told: Told, step: Estimate, flops: str) -> tuple[float, float]:
    """Returns a step's shares of peak with all links 20 % slower, and 20 % faster."""
    shares = []
    for factor in (1 - CHANGE, 1 + CHANGE):
        factors = [factor] * len(told.machine.links.levels)
        again = estimate(step.job, with_rates(told.machine, factors), step.memory)
        shares.append(share_of_peak(told, again, flops))
    return shares[0], shares[1]


# --- Predictions ---------------------------------------------------------------------------------


def _as_it_ran(case: Case, way: Way, machine: Machine) -> Estimate | None:
    """Predicts a step on its grid, or on the best grid that its framework has."""
    if case.grid is None and way.axes:
        return fastest_of(jobs_of_framework(case, way), machine)
    try:
        return estimate_case(case, machine)
    except PlannerError:  # nothing fits
        return None


def _model_and_gpus(case: Case) -> Case:
    """Returns the step without the options that the planner chooses itself."""
    options = Options(dtype=case.options.dtype, optimizer=case.options.optimizer)
    return replace(case, grid=None, options=options, overlap=None, powers_of_two=False)


def _planned(case: Case, machine: Machine, *, most_stages: int) -> Estimate | None:
    """Predicts the planner's own proposal, with and without the source's ZeRO and offload."""
    request = Request(
        case.model, case.model_name, num_ranks=case.num_ranks, machine=machine,
        batch_size=case.batch_size, dtype=case.options.dtype, top=1, max_pipe=most_stages,
        optimizers=tuple(dict.fromkeys((OptimizerOptions(), case.options.optimizer))),
    )  # fmt: skip
    try:
        return plan(request).configs[0]
    except PlannerError:  # nothing fits
        return None


def jobs_of_framework(case: Case, way: Way) -> Iterator[Job]:
    """Yields the steps that a framework could run: its grids and numbers of micro-batches."""
    most = dict(way.axes)
    for pipe in divisors(case.num_ranks):
        for grid in grids_of(case.num_ranks, pipe=pipe):
            if any(ranks > most.get(axis, 1) for axis, ranks in grid.as_dict().items()):
                continue
            for parts in _numbers_of_micro_batches(case, way, grid):
                options = replace(case.options, micro_batches=parts)
                yield case.on(grid, options)


def _numbers_of_micro_batches(case: Case, way: Way, grid: GridShape) -> Iterator[int]:
    if not way.sequences:
        yield case.options.micro_batches
    for sequences in way.sequences:
        parts, rest = divmod(case.batch_size, grid.data * grid.z * sequences)
        if parts and not rest:
            yield parts


def fastest_of(jobs: Iterable[Job], machine: Machine) -> Estimate | None:
    """Returns the fastest job that is legal and fits; None if there is none."""
    legal = (job for job in jobs if next(violations(job), None) is None)
    memory = {job: memory_on(job, machine) for job in legal}
    fitting = (
        job
        for job, held in memory.items()
        if held.total
        <= machine.memory_limit_on(job.grid, job.options, fraction=Request.memory_fraction)
    )
    promising = nsmallest(_SIMULATED, fitting, key=ClosedForms(machine).seconds)
    steps = StageSteps(machine)
    estimates = (estimate(job, machine, memory[job], steps=steps) for job in promising)
    return min(estimates, key=lambda e: e.step_time_s, default=None)
