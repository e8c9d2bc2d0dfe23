"""Simulates a step of one rank: in full, at a cost independent of its size, or in parts."""

from __future__ import annotations

from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.simulation.after_passes import AfterPasses
from axonn_ext.planner.simulation.events import Timeline
from axonn_ext.planner.simulation.passes import Simulation
from axonn_ext.planner.simulation.prepared_step import PreparedStep
from axonn_ext.planner.step.program import make_program


def timeline(job: Job, machine: Machine) -> Timeline:
    """Simulates the whole step of a legal job, with all its events.

    Raises ValueError for a grid with several stages: see pipeline_timeline.
    """
    job.grid.refuse_pipe("the timeline of one rank")
    step = PreparedStep(job, make_program(job), machine, records=True)
    passes = Simulation(job, step, records=True).run(
        step.program.num_layers, step.program.num_micro_batches
    )
    return AfterPasses(job, step, records=True).finish(passes)


def prepare(job: Job, machine: Machine, *, stage: int = 0) -> PreparedStep:
    """Returns what `simulate` needs of a job, whatever the numbers of its Overlap are.

    stage: the pipe coordinate.
    """
    return PreparedStep(job, make_program(job, stage), machine, records=False)


def simulate(job: Job, machine: Machine, *, step: PreparedStep | None = None) -> Timeline:
    """Simulates only the times of a step, at a cost that does not grow with its size.

    All layers are alike, and so are all micro-batches. Once the streams have reached a steady
    state, the time of all passes grows linearly with the numbers of layers and of micro-batches. So
    only a few of each are simulated, and the rest is extrapolated. A test compares the result with
    the whole schedule.

    step: prepared for the job, or for one that differs only in the numbers of Overlap.

    Raises ValueError for a grid with several stages: see simulate_pipeline.
    """
    job.grid.refuse_pipe("the simulation of one rank")
    step = prepare(job, machine) if step is None else step
    parts = step.program.num_micro_batches
    one, two = (2, 3) if parts > 3 else (parts, parts)
    simulation = Simulation(job, step, records=False)
    if two > one:
        short, long = simulation.run_all_layers((one, two))
        passes = short.extended(long, (parts - one) / (two - one))
    else:
        (passes,) = simulation.run_all_layers((parts,))
    return AfterPasses(job, step, records=False).finish(passes)


def simulate_parts(job: Job, step: PreparedStep) -> tuple[Timeline, Timeline]:
    """Simulates one rank of a stage by itself, as if it always had the messages that it needs.

    step: the rank's step.

    Returns one micro-batch, forward and backward, among others like it; and what follows the last
    one once per step, which includes the optimizer.
    """
    before, longer = Simulation(job, step, records=False).run_all_layers((2, 3))
    one = before.less(longer)
    whole = AfterPasses(job, step, records=False).finish(before)
    return (
        Timeline(one.end_s, one.compute_s, one.exposed_s, 0.0, ()),
        Timeline(
            whole.step_time_s - before.end_s, whole.compute_s - before.compute_s,
            {axis: seconds - before.exposed_s.get(axis, 0.0)
             for axis, seconds in whole.exposed_s.items()},
            whole.optimizer_s, (),
        ),
    )  # fmt: skip
