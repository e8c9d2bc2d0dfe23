"""Predicts a step on a grid with several stages: the times of each, and their schedule together.

The simulation of one rank gives what a stage takes for a micro-batch, by itself; the simulator of
schedules gives when which stage runs what, and so how long they wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonn_ext.planner.costs import Costs, TaskCost
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.pipeline_simulator import Simulation, StageTimes, simulate
from axonn_ext.planner.shares import shares_of
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.tasks import Task
from axonn_ext.planner.timeline import Event, Timeline, simulate_parts
from axonn_ext.spec.pipeline import Task as ScheduledTask

# Of more micro-batches than these, in multiples of the stages, only so many are simulated.
_FEW, _SOME = 4, 6
AFTER = "sums of gradients, optimizer"  # what all stages do after the last task of a step


@dataclass(frozen=True)
class PipelineStep:
    """A modelled step of a pipeline.

    step        the step of the stage that is busy longest; exposed_s["pipe"] is its bubble: it
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


def simulate_pipeline(job: Job, machine: Machine) -> PipelineStep:
    """Simulates a step of a legal job on a grid with several stages."""
    parts, costs = job.options.micro_batches, Costs(machine, job.grid, job.options.dtype)
    kinds = {share: stage for stage, share in enumerate(shares_of(job))}
    ones, afters, times = {}, {}, {}
    for share, stage in kinds.items():
        ones[share], afters[share] = simulate_parts(job, stage, machine)
        times[share] = _stage_times(job, stage, costs, ones[share].step_time_s)
    slowest = max(range(job.grid.pipe), key=lambda s: ones[shares_of(job)[s]].step_time_s)
    messages = make_program(job, 0).messages
    message_s = costs.collective(messages[0])
    stages = tuple(times[share] for share in shares_of(job))
    after_s = max(after.step_time_s for after in afters.values())
    seconds = _seconds(job, stages, message_s) + after_s
    share = shares_of(job)[slowest]
    one, after = ones[share], afters[share]
    compute_s = parts * one.compute_s + after.compute_s
    exposed = _sum(one.exposed_s, after.exposed_s, parts)
    exposed["pipe"] = 0.0
    exposed["pipe"] = max(0.0, seconds - compute_s - sum(exposed.values()))
    seconds = compute_s + sum(exposed.values())
    step = Timeline(seconds, compute_s, exposed, after.optimizer_s, ())
    return PipelineStep(step, stages, slowest, message_s, after_s)


def pipeline_timeline(job: Job, machine: Machine) -> Timeline:
    """Simulates the whole schedule of a legal job on a grid with several stages.

    The events are the tasks of every stage, and what all of them do once after the last one.
    """
    found = simulate_pipeline(job, machine)
    parts, stages = job.options.micro_batches, range(job.grid.pipe)
    schedule = simulate_schedule(job, found.stages, found.message_s, parts)
    end = schedule.seconds + found.after_s
    events = [
        Event(f"stage {stage}", _name(job, task), start, stop, task.micro_batch)
        for stage in stages
        for task, start, stop in schedule.tasks[stage]
    ]
    events += [Event(f"stage {s}", AFTER, schedule.seconds, end, parts - 1) for s in stages]
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


def _stage_times(job: Job, stage: int, costs: Costs, seconds: float) -> StageTimes:
    """Splits the seconds of a stage for a micro-batch like those of its tasks on the path."""
    forward = backward = weight = 0.0
    for i, (tasks, repeats) in enumerate(make_program(job, stage).micro_batch()):
        for task in tasks:
            spent = repeats * _on_path(job, costs.task(task))
            if i < 3:
                forward += spent
            elif _is_weight_gradient(task):
                weight += spent
            else:
                backward += spent
    scale = seconds / (forward + backward + weight)
    return StageTimes(scale * forward, scale * backward, scale * weight)


def _on_path(job: Job, cost: TaskCost) -> float:
    beside = 0.0 if job.options.overlap is not None else cost.gather + cost.scatter
    return cost.seconds + beside


def _is_weight_gradient(task: Task) -> bool:
    return task.matmul is not None and task.matmul.layout == "TN"


def _seconds(job: Job, stages: Sequence[StageTimes], message_s: float) -> float:
    """Returns the seconds from the first task of a step to the last one.

    Once the pipeline is full, they grow linearly with the number of micro-batches.
    """
    parts, pipe = job.options.micro_batches, job.grid.pipe
    few, some = _FEW * pipe, _SOME * pipe
    if parts <= some:
        return simulate_schedule(job, stages, message_s, parts).seconds
    low, high = (simulate_schedule(job, stages, message_s, n).seconds for n in (few, some))
    return low + (high - low) * (parts - few) / (some - few)


def simulate_schedule(
    job: Job, stages: Sequence[StageTimes], message_s: float, micro_batches: int
) -> Simulation:
    """Simulates the schedule of a job with that many micro-batches.

    stages: the seconds of each stage for one micro-batch, all of its chunks together.
    """
    options, pipe, n = job.options.pipeline, job.grid.pipe, job.options.pipeline.chunks
    of_chunks = [StageTimes(t.forward / n, t.backward / n, t.weight / n) for t in stages]
    return simulate(
        options.schedule, of_chunks, micro_batches, chunks=options.chunks,
        message_seconds=lambda *_: message_s,
        in_flight=[options.most_in_flight(pipe, stage) for stage in range(pipe)],
        defer_weights=options.defer_weights,
    )  # fmt: skip
