"""Stages that share cores, against a simulation that tracks the remaining work of each task."""

from __future__ import annotations

import dataclasses
import random

import pytest

from axonn_ext.planner import Job, Options
from axonn_ext.planner.simulation.pipelines import pipeline_timeline, simulate_pipeline
from axonn_ext.planner.simulation.shared_cores import on_shared_cores
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.pipeline import fixed_order
from axonn_ext.spec.pipeline_simulator import StageTimes, simulate
from planner_machines import machine_of


def seconds_of(schedule: str, times: list[StageTimes], micro_batches: int, ratio: float) -> float:
    """The time of a step without messages, by events. Backward includes weight gradients."""
    stages, last = len(times), len(times) - 1
    orders = [
        list(fixed_order(schedule, stages=stages, stage=s, micro_batches=micro_batches, chunks=1))
        for s in range(stages)
    ]
    done: set[tuple[int, str, int]] = set()
    left: dict[int, float] = {}  # stage -> remaining work of its running task
    now = 0.0
    while any(orders):
        for stage, order in enumerate(orders):
            if not order or stage in left:
                continue
            kind, number = order[0].kind, order[0].micro_batch
            needs = (stage - 1, kind, number) if kind == "forward" else (stage + 1, kind, number)
            if kind == "backward" and stage == last:
                needs = (stage, "forward", number)
            if needs in done or needs[0] < 0:
                t = times[stage]
                left[stage] = t.forward if kind == "forward" else t.backward + t.weight
        speed = min(ratio, stages / len(left))
        step = min(left.values())
        now += step / speed
        for stage in list(left):
            left[stage] -= step
            if left[stage] <= 1e-12:
                del left[stage]
                task = orders[stage].pop(0)
                done.add((stage, task.kind, task.micro_batch))
    return now


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_steps_take_what_the_work_that_is_left_says(schedule) -> None:
    rng = random.Random(3)
    for _ in range(30):
        times = [StageTimes(*(rng.choice([1.0, 1.5, 2.0]) for _ in range(3)))
                 for _ in range(rng.choice([2, 3, 4]))]  # fmt: skip
        parts, ratio = rng.choice([2, 5, 8]), rng.choice([1.0, 1.5, 2.0, 4.0])
        found = on_shared_cores(simulate(schedule, times, parts), ratio)
        assert found.seconds == pytest.approx(seconds_of(schedule, times, parts, ratio))


def test_all_cores_work_where_a_stage_can_use_them_all() -> None:
    times = [StageTimes(1.0, 1.0, 1.0), StageTimes(2.0, 1.0, 0.5), StageTimes(1.0, 1.0, 1.0)]
    for schedule in ("message_driven", "zero_bubble", "1f1b"):
        alone = simulate(schedule, times, 6)
        shared = on_shared_cores(alone, 3.0)
        assert shared.seconds == pytest.approx(sum(alone.busy) / 3)
        assert [len(run) for run in shared.tasks] == [len(run) for run in alone.tasks]
        assert max(end for run in shared.tasks for _, _, end in run) == shared.seconds
        assert on_shared_cores(alone, 1.0) is alone


def test_plans_have_shorter_bubbles_on_shared_cores() -> None:
    machine = machine_of()
    crowded = dataclasses.replace(machine, ranks_per_core=2.0)
    model, options = ModelConfig(512, 256, 12, 8, 128), Options(micro_batches=8)
    job = Job(model, GridShape(pipe=4), options, 64)
    alone, shared = simulate_pipeline(job, machine), simulate_pipeline(job, crowded)
    work = sum(t.forward + t.backward + t.weight for t in alone.stages) / 4
    least = job.options.micro_batches * work + alone.after_s
    assert least * (1 - 1e-9) <= shared.step.step_time_s < 0.95 * alone.step.step_time_s
    step = shared.step
    assert step.compute_s + sum(step.exposed_s.values()) == pytest.approx(step.step_time_s)
    assert pipeline_timeline(job, crowded).step_time_s == pytest.approx(step.step_time_s, rel=0.02)
