"""How far a prediction may be off: by published runs, and by unknowns of a machine's file.

Each part of the range of a step has its source in the machine's file, or is called a guess there:

* Rates of more groups on a node's links than were measured may be higher.
* Rates of jobs beyond a part of the network may be lower: dragonflies and shared trees are tapered.
* The slowest of many ranks sets the pace.
* Collectives that run alongside computation take some of its units (SMs or CUs).

Errors of the model itself are not part of a StepRange; docs/planner_fit.md compares predictions
with published runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from axonn_ext.planner.estimate import Estimate, simulate_step
from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.machines.scaled_links import with_rates
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.step.program import make_program

# In 8 of 10 published runs, the ratio of the step time to its prediction was in this range: the
# 10th to the 90th percentile of (1 + error), with each source held out. A test recomputes them.
RANGE = (0.89, 1.13)
# Steps are simulated for a few layers and micro-batches and then extrapolated, which is within 2 %
# of the whole schedule (docs/planner_model.md). A smaller difference says nothing.
TIE = 0.02


class StepRange(NamedTuple):
    """The least and the most seconds of a step; reasons: what makes the difference."""

    least_s: float
    most_s: float
    reasons: tuple[str, ...]


def step_range(job: Job, machine: Machine) -> StepRange:
    """Returns the range of a legal job's step; its ends are equal if all is known."""
    fast, faster = _faster_links(job, machine)
    slow, slower = _slower_links(job, machine)
    factor, why = _slower_compute(job, slow)
    slow = replace(slow, slowdown=slow.slowdown * factor)
    return StepRange(
        simulate_step(job, fast).step_time_s, simulate_step(job, slow).step_time_s,
        (*faster, *slower, *why),
    )  # fmt: skip


def _faster_links(job: Job, machine: Machine) -> tuple[Machine, tuple[str, ...]]:
    """Returns the machine with the best rates that unmeasured numbers of groups may reach."""
    factors, reasons, most = [], [], 1
    for level in machine.links.levels:
        # This many groups leave a unit of the level below together: each of its ranks has one along
        # the slowest axis that crosses the level.
        groups = min(most, max(_inner_sizes(job)))
        known = level.neighbours_measured
        shares = known is not None and groups > known and job.grid.size > most
        factors.append(level.unmeasured_rate if shares else 1.0)
        if shares:
            reasons.append(
                f"{groups} groups share the links of {level.name}, at most {known} measured"
            )
        most = level.ranks or most
    return with_rates(machine, factors), tuple(reasons)


def _inner_sizes(job: Job) -> list[int]:
    sizes = job.grid.as_dict()
    return [job.grid.inner(axis) for axis, size in sizes.items() if size > 1] or [1]


def _slower_links(job: Job, machine: Machine) -> tuple[Machine, tuple[str, ...]]:
    """Returns the machine with the lowest rates that large jobs may have."""
    factors, reasons = [], []
    for level in machine.links.levels:
        full = level.full_rate_ranks
        tapers = full is not None and job.grid.size > full and level.least_rate < 1
        factors.append(level.least_rate if tapers else 1.0)
        if tapers:
            reasons.append(
                f"{level.name} has {level.least_rate:.0%} of its rate beyond {full:,} ranks"
            )
    return with_rates(machine, factors), tuple(reasons)


def _slower_compute(job: Job, machine: Machine) -> tuple[float, tuple[str, ...]]:
    """Returns the factor by which computation may be slower than the machine's slowdown says."""
    factor, reasons = 1.0, []
    node = machine.links.levels[0].ranks
    if machine.straggler_share and node is not None and job.grid.size > node:
        factor += machine.straggler_share
        reasons.append(f"the slowest rank is {machine.straggler_share:.0%} slower")
    beside = _share_beside(job, machine) if machine.communication_units else 0.0
    if beside:
        taken = machine.communication_units / machine.products.num_units
        factor *= 1 + beside * (1 / (1 - taken) - 1)
        reasons.append(
            f"collectives take {taken:.0%} of the units for {beside:.0%} of the computation"
        )
    return factor, tuple(reasons)


def _share_beside(job: Job, machine: Machine) -> float:
    """Returns the share of computation during which collectives may run; 0 without overlap."""
    if job.options.overlap is None:
        return 0.0
    program, costs = make_program(job), Costs(machine, job.grid, job.options.dtype)
    compute = moved = 0.0
    for tasks, times in program.micro_batch():
        for task in tasks:
            over_z = (c for c in (task.gather, task.scatter) if c is not None)
            compute += times * costs.compute(task)
            moved += times * sum(map(costs.collective, over_z))
    parts = program.num_micro_batches
    sums = sum(costs.collective(c) for c in program.gradient_sums)
    sums += parts * sum(costs.collective(c) for c in program.sums_in_each)
    return min(1.0, (moved + sums / parts) / compute) if compute else 0.0


def is_tie(estimate: Estimate, best: Estimate) -> bool:
    """Whether the simulation cannot tell a configuration from the best one."""
    return estimate.step_time_s <= (1 + TIE) * best.step_time_s


def published_range(seconds: float) -> tuple[float, float]:
    """Returns the range of seconds that most published runs took for such a prediction."""
    return RANGE[0] * seconds, RANGE[1] * seconds
