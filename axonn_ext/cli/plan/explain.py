"""Prints one configuration item by item: its memory, its time, and what each axis carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from axonn_ext.cli.plan.cells import (
    duration,
    micro_batches,
    options,
    schedule,
    words,
)
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.events import COMPUTE
from axonn_ext.planner.simulation.linear_passes import LinearPasses
from axonn_ext.planner.simulation.pipelines import PipelineStep, simulate_pipeline
from axonn_ext.planner.simulation.simulate import timeline
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.planner.step.volumes import all_collectives, most_bytes_by_axis
from axonn_ext.planner.uncertainty import step_range
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.terminal.console import new_table, print_table, say


def print_explanation(
    console: Console, estimate: Estimate, machine: Machine, *, number: int
) -> None:
    """Prints memory, time and volumes of one configuration, item by item."""
    job = estimate.job
    say(console, "")
    say(console, f"number {number}: {job.grid}; {micro_batches(job)} sequences; {options(job)}")
    say(console, "")
    print_table(console, _memory_table(estimate, machine))
    say(console, "")
    print_table(console, _time_table(estimate, machine))
    say(console, "")
    say(console, _range_of(job, machine))
    if job.grid.pipe > 1:
        say(console, "")
        say(console, describe_pipeline(estimate, simulate_pipeline(job, machine)))
    if any(getattr(job.grid, axis) > 1 for axis in COMMUNICATING):
        say(console, "")
        print_table(console, _axes_table(estimate, machine))
    if job.options.overlap is not None and job.grid.z > 1:
        say(console, "")
        say(console, "GB sent: if no gathered weight is held from one use to the next")


def describe_pipeline(estimate: Estimate, pipeline: PipelineStep) -> str:
    """Describes the stages of a configuration, and how long they are modelled to wait."""
    job, slowest = estimate.job, pipeline.slowest
    layers = ", ".join(str(share.num_layers) for share in shares_of(job))
    of_slowest = pipeline.stages[slowest]
    seconds = of_slowest.forward + of_slowest.backward + of_slowest.weight
    return (
        f"pipeline: {schedule(job.options.pipeline)}, {job.grid.pipe} stages of {layers} blocks; "
        f"stage {slowest} is busy longest, {duration(seconds)} a micro-batch, and idles for "
        f"{pipeline.bubble:.1%} of the step (modelled; its time is above, the memory is that of "
        "the fullest stage, and GB sent are those of the stage that sends most)"
    )


def _range_of(job: Job, machine: Machine) -> str:
    found = step_range(job, machine)
    if not found.reasons:
        return "range: the machine's file states no uncertainty"
    reasons = "; ".join(found.reasons)
    return f"range: {duration(found.least_s)} to {duration(found.most_s)} ({reasons})"


def _memory_table(estimate: Estimate, machine: Machine) -> Table:
    memory = estimate.memory
    table = new_table(("memory of a GPU", "GB", "share"))
    for name, num_bytes in memory._asdict().items():
        table.add_row(words(name), *_amount(num_bytes, memory.total))
    table.add_row("total", *_amount(memory.total, memory.total), style="bold")
    table.add_row(f"of {machine.name}", *_amount(machine.memory_bytes, machine.memory_bytes)[:1])
    return table


def _amount(num_bytes: int, total: int) -> tuple[str, str]:
    return f"{num_bytes / 1e9:,.2f}", f"{num_bytes / total:.0%}"


def time_kinds(estimate: Estimate, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step by kind of work, and by the axis that computation waits for."""
    rows = compute_kinds(estimate.job, machine)
    rows["optimizer"] = estimate.optimizer_s
    for axis in COMMUNICATING:
        if axis in estimate.exposed_s:
            rows[f"waiting for {axis}"] = estimate.exposed_s[axis]
    return rows


def _time_table(estimate: Estimate, machine: Machine) -> Table:
    table = new_table(("time of a step", "ms", "share"))
    for name, seconds in time_kinds(estimate, machine).items():
        table.add_row(name, f"{seconds * 1e3:,.2f}", f"{seconds / estimate.step_time_s:.1%}")
    table.add_row("step", f"{estimate.step_time_s * 1e3:,.2f}", "100.0%", style="bold")
    return table


def compute_kinds(job: Job, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step for products, attention and elementwise work.

    In a pipeline, they are those of the stage that is busy longest.
    """
    program = make_program(job, _slowest(job, machine))
    costs = Costs(machine, job.grid, job.options.dtype)
    spent: defaultdict[str, float] = defaultdict(float)
    passes = LinearPasses(job, machine, costs)
    for tasks, repeats in program.micro_batch():
        for unit in passes.units(tasks):
            times = repeats * program.num_micro_batches
            attention = elementwise = 0.0
            for task in unit.tasks:
                attention += costs.compute(task._replace(matmul=None, touched_bytes=0))
                elementwise += costs.compute(task._replace(matmul=None, scores=None))
            computed = sum(done.compute_s for done in unit.passes)
            spent["products"] += times * (computed - attention - elementwise)
            spent["attention"] += times * attention
            spent["elementwise"] += times * elementwise
    return dict(spent)


def _slowest(job: Job, machine: Machine) -> int:
    """Returns the pipe coordinate that is busy longest."""
    return simulate_pipeline(job, machine).slowest if job.grid.pipe > 1 else 0


def _axes_table(estimate: Estimate, machine: Machine) -> Table:
    """Returns a table of the axes with several ranks: their bytes, and how much time is hidden."""
    job = estimate.job
    volumes = most_bytes_by_axis(job)
    busy = busy_seconds(job, machine)
    table = new_table(("axis", "ranks", "GB sent", "GB/s", "busy ms", "hidden ms", "exposed ms"))
    for axis in COMMUNICATING:
        ranks = getattr(job.grid, axis)
        if ranks == 1:
            continue
        waited = estimate.exposed_s.get(axis, 0.0)
        link = machine.link(job.grid, axis)
        table.add_row(
            axis, str(ranks), f"{volumes.get(axis, 0) / 1e9:,.3f}",
            f"{link.bytes_per_s / 1e9:,.1f}", f"{busy[axis] * 1e3:,.2f}",
            f"{max(0.0, busy[axis] - waited) * 1e3:,.2f}", f"{waited * 1e3:,.2f}",
        )  # fmt: skip
    return table


def busy_seconds(job: Job, machine: Machine) -> Mapping[str, float]:
    """Returns the seconds for which the wire of each axis carries its bytes in the simulated step.

    A collective that pauses while another axis uses the wire is not busy meanwhile. In a pipeline,
    they are the times of the collectives and messages, by themselves, of the stage that is busy
    longest.
    """
    busy: defaultdict[str, float] = defaultdict(float)
    if job.grid.pipe > 1:
        costs = Costs(machine, job.grid, job.options.dtype)
        for c, times in all_collectives(make_program(job, _slowest(job, machine))):
            busy[c.axis] += times * costs.collective(c)
        return busy
    for event in timeline(job, machine).events:
        if event.stream != COMPUTE:
            busy[event.stream] += event.busy_s
    program = make_program(job)
    costs = Costs(machine, job.grid, job.options.dtype)
    for c in program.sums_in_each:  # the events include the last micro-batch's
        busy[c.axis] += (program.num_micro_batches - 1) * costs.collective(c)
    return busy
