"""Simulates a step of one rank: whole, at a cost that does not grow with it, or in its parts."""

from __future__ import annotations

from axonn_ext.planner.after_passes import AfterPasses
from axonn_ext.planner.costs import Costs
from axonn_ext.planner.events import Timeline
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.simulation import Simulation
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.tasks import Program


def timeline(job: Job, machine: Machine) -> Timeline:
    """Simulates the whole step of a legal job, with all its events.

    Raises ValueError for a grid with several stages: see pipeline_timeline.
    """
    job.grid.refuse_pipe("the timeline of one rank")
    program = make_program(job)
    simulation, after = _parts_of(job, program, machine, records=True)
    return after.finish(simulation.run(program.num_layers, program.num_micro_batches))


def simulate(job: Job, machine: Machine) -> Timeline:
    """Simulates only the times of a step, at a cost that does not grow with its size.

    All layers are alike, and so are all micro-batches. Once the streams have reached a steady
    state, the time of all passes grows linearly with the number of layers, and with that of
    micro-batches. So only a few of each are simulated, and the rest is extrapolated. A test
    compares the result with the whole schedule.

    Raises ValueError for a grid with several stages: see simulate_pipeline.
    """
    job.grid.refuse_pipe("the simulation of one rank")
    program = make_program(job)
    parts = program.num_micro_batches
    one, two = (2, 3) if parts > 3 else (parts, parts)
    simulation, after = _parts_of(job, program, machine)
    passes = simulation.run_all_layers(one)
    if two > one:
        passes = passes.extended(simulation.run_all_layers(two), (parts - one) / (two - one))
    return after.finish(passes)


def simulate_parts(job: Job, program: Program, machine: Machine) -> tuple[Timeline, Timeline]:
    """Simulates one rank of a stage by itself, as if it always had the messages that it needs.

    program: the step of the rank.

    Returns one micro-batch, forward and backward, among others like it; and what follows once a
    step after the last one, of which the optimizer is a part.
    """
    simulation, after = _parts_of(job, program, machine)
    before = simulation.run_all_layers(2)
    one = before.less(simulation.run_all_layers(3))
    step = after.finish(before)
    return (
        Timeline(one.end_s, one.compute_s, one.exposed_s, 0.0, ()),
        Timeline(
            step.step_time_s - before.end_s, step.compute_s - before.compute_s,
            {axis: seconds - before.exposed_s.get(axis, 0.0)
             for axis, seconds in step.exposed_s.items()},
            step.optimizer_s, (),
        ),
    )  # fmt: skip


def _parts_of(
    job: Job, program: Program, machine: Machine, *, records: bool = False
) -> tuple[Simulation, AfterPasses]:
    """Returns the two parts of a step: its passes, and what follows them."""
    costs = Costs(machine, job.grid, job.options.dtype)
    simulation = Simulation(job, program, machine, costs, records=records)
    return simulation, AfterPasses(
        program, costs, overlaps=job.options.overlap is not None, records=records
    )
