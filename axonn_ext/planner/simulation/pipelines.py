"""Predicts a step on a grid with several stages: the times of each, and their schedule together.

The simulation of one rank gives the time a stage takes for a micro-batch by itself; the simulator
of schedules gives the order and times of all stages' tasks, and so how long they wait for each
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.in_flight import most_deferred
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.events import Event, Timeline
from axonn_ext.planner.simulation.linear_passes import Unit
from axonn_ext.planner.simulation.prepared_step import PreparedStep
from axonn_ext.planner.simulation.shared_cores import on_shared_cores
from axonn_ext.planner.simulation.simulate import prepare, simulate_parts
from axonn_ext.planner.step.messages import messages
from axonn_ext.planner.step.rank import Rank
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.pipeline import Task as ScheduledTask
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.pipeline_simulator import Simulation, StageTimes, simulate

# With more micro-batches than these, in multiples of the stages, only this many are simulated.
_FEW, _SOME = 4, 6
AFTER = "sums of gradients, optimizer"  # the work of all stages after the last task of a step


@dataclass(frozen=True)
class PipelineStep:
    """A modelled step of a pipeline.

    step        the step of the stage that is busy longest; exposed_s["pipe"] is its bubble: its
                waits for messages, and for sums over the stages
    stages      the seconds of each stage for one micro-batch, all its chunks together
    slowest     the pipe coordinate of the stage that is busy longest
    message_s   the seconds of a message
    after_s     the seconds that follow the last task: sums of gradients and the optimizer
    """

    step: Timeline
    stages: tuple[StageTimes, ...]
    slowest: int
    message_s: float
    after_s: float

    @property
    def bubble(self) -> float:
        """The share of the step in which the slowest stage idles."""
        return self.step.exposed_s["pipe"] / self.step.step_time_s


class StageStep(NamedTuple):
    """The step of a stage that always has the messages that it needs.

    one    a micro-batch among others like it
    after  what follows after the last one, once per step
    times  the seconds of the tasks of a micro-batch
    """

    one: Timeline
    after: Timeline
    times: StageTimes


class StageSteps:
    """The steps of stages by themselves, on one machine.

    A stage does the same under most schedules, so its step is simulated once and kept.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._kept: dict[tuple[object, ...], StageStep] = {}

    def of(self, job: Job, stage: int) -> StageStep:
        """Returns the step of a pipe coordinate of a legal job."""
        options, share = job.options, shares_of(job)[stage]
        if options.sharded:  # messages are whole and need no further work
            share = share._replace(forward_sends=0, backward_sends=0)
        alike = replace(options, pipeline=PipelineOptions())
        key = (job.model, job.grid, alike, job.batch_size, share, options.pipeline.defers)
        if key not in self._kept:
            self._kept[key] = self._simulate(job, stage)
        return self._kept[key]

    def _simulate(self, job: Job, stage: int) -> StageStep:
        step = prepare(job, self.machine, stage=stage)
        one, after = simulate_parts(job, step)
        return StageStep(one, after, _stage_times(job, step, one.step_time_s))


def simulate_pipeline(
    job: Job, machine: Machine, *, steps: StageSteps | None = None
) -> PipelineStep:
    """Simulates a step of a legal job on a grid with several stages.

    steps: the steps already simulated on the machine, to which this job's are added.
    """
    steps = StageSteps(machine) if steps is None else steps
    parts, costs = job.options.micro_batches, Costs(machine, job.grid, job.options.dtype)
    alone = [steps.of(job, stage) for stage in range(job.grid.pipe)]
    slowest = max(range(job.grid.pipe), key=lambda s: alone[s].one.step_time_s)
    message_s = costs.collective(messages(Rank(job))[0])
    stages = tuple(step.times for step in alone)
    after_s = max(step.after.step_time_s for step in alone)
    seconds = _seconds(job, machine, stages, message_s) + after_s
    one, after, _ = alone[slowest]
    compute_s = parts * one.compute_s + after.compute_s
    exposed = _sum(one.exposed_s, after.exposed_s, parts)
    exposed["pipe"] = 0.0
    if machine.ranks_per_core > 1:  # a stage is faster while others wait
        compute_s = min(compute_s, seconds - sum(exposed.values()))
    exposed["pipe"] = max(0.0, seconds - compute_s - sum(exposed.values()))
    seconds = compute_s + sum(exposed.values())
    step = Timeline(seconds, compute_s, exposed, after.optimizer_s, ())
    return PipelineStep(step, stages, slowest, message_s, after_s)


def pipeline_timeline(job: Job, machine: Machine) -> Timeline:
    """Simulates the whole schedule of a legal job on a grid with several stages.

    The events are the tasks of every stage, and the work of all stages after the last one.
    """
    found = simulate_pipeline(job, machine)
    parts, stages = job.options.micro_batches, range(job.grid.pipe)
    schedule = simulate_schedule(job, machine, found.stages, found.message_s, parts)
    end = schedule.seconds + found.after_s
    events = [
        Event(f"stage {stage}", _name(job, task), start, stop, stop - start, task.micro_batch)
        for stage in stages
        for task, start, stop in schedule.tasks[stage]
    ]
    events += [
        Event(f"stage {s}", AFTER, schedule.seconds, end, found.after_s, parts - 1) for s in stages
    ]
    step = found.step
    bubble = max(0.0, step.exposed_s["pipe"] + end - step.step_time_s)
    return Timeline(
        end, step.compute_s, {**step.exposed_s, "pipe": bubble}, step.optimizer_s, tuple(events)
    )


def _name(job: Job, task: ScheduledTask) -> str:
    chunk = f", chunk {task.chunk}" if job.options.pipeline.chunks > 1 else ""
    return f"micro-batch {task.micro_batch}{chunk}: {task.kind}"


def _sum(each: Mapping[str, float], once: Mapping[str, float], times: int) -> dict[str, float]:
    return {a: times * each.get(a, 0.0) + once.get(a, 0.0) for a in {**each, **once}}


def _stage_times(job: Job, step: PreparedStep, seconds: float) -> StageTimes:
    """Splits a stage's seconds for a micro-batch in proportion to its tasks on the path."""
    program, costs = step.program, step.costs
    forward = backward = weight = 0.0
    for i, (units, (_, repeats)) in enumerate(zip(step.units, program.micro_batch(), strict=True)):
        for unit in units:
            spent = repeats * _on_path(job, costs, unit)
            if i < program.parts.num_forward:
                forward += spent
            else:
                of_weight = spent * _share_of_weight_gradient(costs, unit)
                weight += of_weight
                backward += spent - of_weight
    scale = seconds / (forward + backward + weight)
    return StageTimes(scale * forward, scale * backward, scale * weight)


def _share_of_weight_gradient(costs: Costs, unit: Unit) -> float:
    """Returns the share of a unit's computation that computes the gradient of a weight."""
    computed = [costs.compute(task) for task in unit.tasks]
    is_last = unit.tasks[-1].matmul is not None and unit.tasks[-1].matmul.layout == "TN"
    return computed[-1] / sum(computed) if is_last else 0.0


def _on_path(job: Job, costs: Costs, unit: Unit) -> float:
    beside = () if job.options.overlap is not None else (unit.gather, unit.scatter)
    over_z = (c for c in (*unit.over_z, *beside) if c is not None)
    return unit.seconds + sum(costs.collective(c) for c in over_z)


def _seconds(job: Job, machine: Machine, stages: Sequence[StageTimes], message_s: float) -> float:
    """Returns the seconds from the first task of a step to the last one.

    Once the pipeline is full, they grow linearly with the number of micro-batches.
    """
    parts, pipe = job.options.micro_batches, job.grid.pipe
    few, some = _FEW * pipe, _SOME * pipe
    if parts <= some:
        return simulate_schedule(job, machine, stages, message_s, parts).seconds
    low, high = (simulate_schedule(job, machine, stages, message_s, n).seconds for n in (few, some))
    return low + (high - low) * (parts - few) / (some - few)


def simulate_schedule(
    job: Job,
    machine: Machine,
    stages: Sequence[StageTimes],
    message_s: float,
    micro_batches: int,
) -> Simulation:
    """Simulates the schedule of a job with that many micro-batches.

    stages: the seconds of each stage for one micro-batch, all its chunks together.
    """
    options, pipe, n = job.options.pipeline, job.grid.pipe, job.options.pipeline.chunks
    of_chunks = [StageTimes(t.forward / n, t.backward / n, t.weight / n) for t in stages]
    found = simulate(
        options.schedule, of_chunks, micro_batches, chunks=options.chunks,
        message_seconds=lambda *_: message_s,
        in_flight=[options.most_in_flight(pipe, stage) for stage in range(pipe)],
        defer_weights=options.defers, max_deferred=most_deferred(job),
    )  # fmt: skip
    return on_shared_cores(found, machine.ranks_per_core)
