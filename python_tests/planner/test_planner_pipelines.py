"""Modelled steps of pipelines: their times add up; and the search for pipelines."""

from __future__ import annotations

import dataclasses
import random

import pytest

from axonn_ext.planner import (
    Job,
    Options,
    PlannerError,
    Request,
    load_machine,
    memory_of,
    plan,
    simulate,
    timeline,
)
from axonn_ext.planner.job import violations
from axonn_ext.planner.memory.activations import deferred_bytes_of
from axonn_ext.planner.search.choices import other_pipelines
from axonn_ext.planner.search.closed_forms import ClosedForms
from axonn_ext.planner.search.request import PIPELINES
from axonn_ext.planner.simulation.pipelines import StageSteps, simulate_pipeline, simulate_schedule
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.grid import GridShape, divisors, grids_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_model
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline import bubble_seconds
from axonn_ext.spec.pipeline_options import PipelineOptions
from counts import calls_of
from planner_machines import machine_of

MODEL = ModelConfig(512, 256, 12, 8, 128)
SCHEDULES = (
    PipelineOptions(), PipelineOptions(defer_weights=False), PipelineOptions("1f1b"),
    PipelineOptions("gpipe"), PipelineOptions("zero_bubble"),
    PipelineOptions("interleaved", chunks=2),
)  # fmt: skip


# In a stage of 3 blocks, each policy recomputes the same share as in the whole model.
POLICIES = ("none", "attention", "every:3", "full")


def random_job(rng: random.Random) -> Job:
    while True:
        options = Options(
            layout=rng.choice(["sharded", "replicated"]), recompute=rng.choice(POLICIES),
            overlap=rng.choice([None, Overlap()]), micro_batches=rng.choice([2, 8, 16, 64]),
            pipeline=rng.choice(SCHEDULES),
        )  # fmt: skip
        axes = (rng.choice([1, 2, 4]) for _ in range(4))
        model = dataclasses.replace(MODEL, tie_embeddings=rng.random() < 0.5)
        job = Job(model, GridShape(*axes, pipe=rng.choice([2, 4])), options, 1024)
        if not list(violations(job)):
            return job


def test_steps_are_those_of_whole_schedules() -> None:
    """This holds although only some micro-batches are simulated; and all reported times add up."""
    rng, machine = random.Random(7), machine_of()
    for _ in range(20):
        job = random_job(rng)
        found = simulate_pipeline(job, machine)
        step, parts = found.step, job.options.micro_batches
        whole = simulate_schedule(job, machine, found.stages, found.message_s, parts).seconds
        steps = StageSteps(machine)
        after = max(steps.of(job, s).after.step_time_s for s in range(job.grid.pipe))
        assert step.step_time_s == pytest.approx(whole + after, rel=0.02), job
        assert step.compute_s + sum(step.exposed_s.values()) == pytest.approx(step.step_time_s)
        times = [t.forward + t.backward + t.weight for t in found.stages]
        assert times[found.slowest] == max(times)
        assert 0 < found.bubble < 1


def test_known_steps_of_stages_change_nothing() -> None:
    """Steps cached for other schedules and chunks equal those of a job computed by itself."""
    rng, machine = random.Random(9), machine_of()
    for _ in range(5):
        job, steps = random_job(rng), StageSteps(machine)
        for pipeline in PIPELINES:
            options = dataclasses.replace(job.options, pipeline=pipeline)
            other = dataclasses.replace(job, options=options)
            if not list(violations(other)):
                known = simulate_pipeline(other, machine, steps=steps)
                assert known == simulate_pipeline(other, machine)


def test_stages_take_together_what_the_model_takes() -> None:
    """This holds without overlap, except for the loss, which a pipeline sums once per step."""
    machine, whole = machine_of(), PipelineOptions(defer_weights=False)
    for grid in (GridShape(), GridShape(2, 1, 2), GridShape(1, 2, 1, 2)):
        for recompute in POLICIES:
            options = Options(overlap=None, recompute=recompute, micro_batches=4, pipeline=whole)
            one = StageSteps(machine).of(Job(MODEL, grid, options, 256), 0).one
            staged = Job(MODEL, dataclasses.replace(grid, pipe=4), options, 256)
            stages = [StageSteps(machine).of(staged, stage).one for stage in range(4)]
            seconds = sum(stage.step_time_s for stage in stages)
            assert seconds == pytest.approx(one.step_time_s, rel=0.02)
            assert sum(s.compute_s for s in stages) == pytest.approx(one.compute_s)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
def test_bubble_is_that_of_the_formula(schedule: str) -> None:
    """The stages are equal except for a small head, and messages are nearly free."""
    model = ModelConfig(64, 1024, 16, 8, 512)
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = PipelineOptions(schedule, chunks=chunks)
    options = Options(overlap=None, micro_batches=8, pipeline=pipeline)
    job = Job(model, GridShape(pipe=4), options, 64)
    machine = machine_of(inter=1e15)
    found = simulate_pipeline(job, machine)
    slow = found.stages[found.slowest]
    formula = bubble_seconds(
        schedule, stages=4, forward=slow.forward, backward=slow.backward, weight=slow.weight,
        chunks=chunks,
    )  # fmt: skip
    assert found.step.exposed_s["pipe"] == pytest.approx(formula, rel=0.1)
    closed = ClosedForms(machine).seconds(job)
    assert closed + found.step.optimizer_s == pytest.approx(found.step.step_time_s, rel=0.05)


def test_one_rank_has_no_timeline_of_a_pipeline() -> None:
    job = Job(MODEL, GridShape(pipe=2), Options(micro_batches=2), 4)
    for function in (timeline, simulate):
        with pytest.raises(ValueError, match=r"pipe=2: the .* of one rank does not work"):
            function(job, machine_of())


# --- The search ----------------------------------------------------------------------------------


def request_of(**changes: object) -> Request:
    request = Request(MODEL, "small", 16, machine_of(inter=1e9), 64, max_pipe=4, top=1000)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def test_pipelines_are_searched_when_they_are_asked_for() -> None:
    request = request_of()
    found = plan(request)
    assert {config.job.grid.pipe for config in found.configs} == {1, 4}
    times = [config.step_time_s for config in found.configs]
    assert times == sorted(times)
    assert found.fits + sum(found.rejected.values()) == found.num_considered
    for config in found.configs:
        job = config.job
        assert job.grid.size == 16
        assert not list(violations(job))
        assert config.memory == memory_of(job)
        if job.grid.pipe > 1:
            step = simulate_pipeline(job, request.machine).step
            assert config.step_time_s == step.step_time_s
            assert config.exposed_s["pipe"] == step.exposed_s["pipe"]
    one = plan(dataclasses.replace(request, max_pipe=1))
    assert {config.job.grid.pipe for config in one.configs} == {1}
    alone = [config for config in found.configs if config.job.grid.pipe == 1]
    assert list(one.configs[:10]) == alone[:10]
    few = plan(dataclasses.replace(request, max_pipe=3)).configs
    assert {config.job.grid.pipe for config in few} == {1, 2}


def test_schedules_are_those_that_are_asked_for() -> None:
    for schedule in SCHEDULES:
        found = plan(request_of(pipelines=(schedule,), micro_batches=(8,), num_ranks=8))
        staged = [c.job.options.pipeline for c in found.configs if c.job.grid.pipe > 1]
        assert staged and set(staged) == {schedule}
    with pytest.raises(PlannerError, match="pipelines must have at least one"):
        request_of(pipelines=())
    with pytest.raises(PlannerError, match="max_pipe must be a whole number >= 1, got 0"):
        request_of(max_pipe=0)


def test_stages_hold_what_no_other_grid_does() -> None:
    """There are 2 ranks, and only the number of layers is divisible by 2."""
    model = ModelConfig(511, 255, 4, 1, 1)
    request = Request(model, "odd", 2, machine_of(), 3)
    with pytest.raises(PlannerError):
        plan(request)
    assert plan(dataclasses.replace(request, max_pipe=2)).configs[0].job.grid.pipe == 2


def test_more_stages_than_blocks_are_not_tried() -> None:
    model = dataclasses.replace(MODEL, num_layers=2)
    pipes = {c.job.grid.pipe for c in plan(request_of(model=model, max_pipe=16)).configs}
    assert pipes == {1, 2}


def test_grids_of_stages_are_all_factorisations() -> None:
    grids = [grid for pipe in divisors(24) for grid in grids_of(24, pipe=pipe)]
    assert len(set(grids)) == len(grids)
    assert {grid.size for grid in grids} == {24}
    assert len(grids) == sum(24 % (a * b * c * d) == 0 for a in divisors(24) for b in divisors(24)
                             for c in divisors(24) for d in divisors(24))  # fmt: skip


def test_shares_are_the_whole_model() -> None:
    for pipe, chunks in ((2, 1), (4, 1), (2, 3)):
        pipeline = PipelineOptions("interleaved", chunks=chunks) if chunks > 1 else SCHEDULES[0]
        job = Job(MODEL, GridShape(pipe=pipe), Options(micro_batches=4, pipeline=pipeline), 4)
        shares = shares_of(job)
        assert sum(share.num_layers for share in shares) == MODEL.num_layers
        assert [s.has_first for s in shares] == [True] + [False] * (pipe - 1)
        assert [s.has_last for s in shares] == [False] * (pipe - 1) + [True]
        assert sum(s.forward_sends for s in shares) == pipe * chunks - 1
        assert sum(s.backward_sends for s in shares) == pipe * chunks - 1


@pytest.mark.slow
def test_the_largest_search_does_little_more() -> None:
    _, model = load_model("gpt-320b", sequence_length=None)
    request = Request(model, "gpt-320b", 32768, load_machine("perlmutter"), 8192)

    def calls(max_pipe: int) -> int:
        return calls_of(lambda: plan(dataclasses.replace(request, max_pipe=max_pipe)))

    assert calls(16) < 3 * calls(1)


def test_a_search_also_defers_weight_gradients_as_far_as_they_fit() -> None:
    """With enough memory, as many as allowed; otherwise the largest of the candidate limits in
    bytes that fits with the same recomputation."""
    model = ModelConfig(512, 256, 8, 8, 512)
    options = Options(micro_batches=16, pipeline=PipelineOptions("1f1b"))
    job = Job(model, GridShape(pipe=4), options, 64)
    request = Request(model, "small", 4, machine_of(), 64, max_pipe=4)

    def deferring(request: Request) -> list[Job]:
        jobs = other_pipelines(request, job)
        ours = [j for j in jobs if j.options.pipeline.schedule == "message_driven"]
        return [j for j in ours if j.options.pipeline.defers]

    (free,) = deferring(request)
    assert free.options.pipeline.deferred_bytes == 0
    units = [deferred_bytes_of(job, stage) for stage in range(4)]
    limits = [count * max(units) for count in (1, 2, 4)]

    def bounded(limit: int) -> Job:
        pipeline = PipelineOptions(defer_weights=True, deferred_bytes=limit)
        return dataclasses.replace(job, options=dataclasses.replace(options, pipeline=pipeline))

    totals = [memory_of(bounded(limit)).total for limit in limits]
    assert totals == sorted(set(totals)) and totals[-1] < memory_of(free).total
    for limit, total in zip(limits, totals, strict=True):
        tight = dataclasses.replace(request, machine=machine_of(memory=total), memory_fraction=1.0)
        found = [j for j in deferring(tight) if j.options.recompute == "none"]
        assert [j.options.pipeline.deferred_bytes for j in found] == [limit]
        found_step = simulate_pipeline(found[0], tight.machine)
        run = simulate_schedule(found[0], tight.machine, found_step.stages, 0.0, 16)
        most = [-(-limit // of_one) for of_one in units]
        assert all(p <= m for p, m in zip(run.peak_deferred, most, strict=True))
        assert max(run.peak_deferred) > 0


def test_a_limit_of_deferred_weight_gradients_is_in_the_predicted_step() -> None:
    """Few deferred gradients cannot fill the bubble, so a small limit takes longer than none."""
    model = ModelConfig(512, 256, 8, 8, 512)
    times = []
    for limit in (1, 0):
        pipeline = PipelineOptions(in_flight=1, defer_weights=True, deferred_bytes=limit)
        job = Job(model, GridShape(pipe=4), Options(micro_batches=16, pipeline=pipeline), 64)
        times.append(simulate_pipeline(job, machine_of()).step.step_time_s)
    assert times[1] < times[0]
