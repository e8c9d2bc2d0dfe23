"""The planner's memory of stages, against that of stages in real pipelines."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from axonn_ext import clip_grad_norm_, models
from axonn_ext.optim import AdamW
from axonn_ext.pipeline import MicroBatch, Pipeline
from axonn_ext.planner import Job, Options, memory_of
from axonn_ext.planner.job import violations
from axonn_ext.planner.memory import in_flight as in_flight_module
from axonn_ext.planner.memory.in_flight import fullest_units, units_of
from axonn_ext.planner.memory.peak import stage_memory_of
from axonn_ext.planner.memory.states import states_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline import Task, fixed_order
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.pipeline_simulator import StageTimes, simulate
from axonn_ext.spec.stages import Stages
from grids import grid_of

MEGA = 10**6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run_step(job: Job) -> tuple[int, list[Task], int]:
    """The stage of this rank, the tasks that it ran, and the peak bytes of a step.

    The optimizer's state exists, as from the second step on. The profile does not see the memory of
    messages, which threads receive.
    """
    gc.collect()
    options, grid = job.options, grid_of(job.grid)
    stages = Stages.balanced(job.model, job.grid.pipe, options.pipeline.chunks)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = models.build(
            job.model, grid, dataclasses.replace(options, algorithm="sequential"),
            dtype=DTYPES[options.dtype], stages=stages,
        )  # fmt: skip
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        ids = torch.zeros(job.rows, dtype=torch.long).view(-1, job.model.sequence_length)
        batches = [MicroBatch(ids, ids)] * options.micro_batches
        with Pipeline(model, grid, options.pipeline, overlap=options.overlap) as pipeline:
            pipeline.step(batches, num_labels=1.0)
            pipeline.sync_gradients()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            order = [run.task for run in pipeline.stats.tasks]
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += change
        peak = max(peak, now)
    return grid.coords["pipe"], order, peak


DEEP = ModelConfig(1024, 256, 64, 8, 64)
LLAMA = ModelConfig(16384, 512, 24, 8, 64, family="llama", num_kv_heads=4, tie_embeddings=False)


def job_of(model: ModelConfig, grid: GridShape, rows: int, **options: object) -> Job:
    defaults = Options(dtype="fp32", overlap=None, micro_batches=8)
    chosen = dataclasses.replace(defaults, **options)  # type: ignore[arg-type]
    sequences = rows * grid.data * grid.z * chosen.micro_batches // model.sequence_length
    job = Job(model, grid, chosen, sequences)
    assert not list(violations(job))
    return job


# Without sums of products over gloo, whose threads would free memory unseen by the profile.
MEASURED = [
    job_of(DEEP, GridShape(pipe=2), 128),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("1f1b"), recompute="full"),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("gpipe")),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("zero_bubble")),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("interleaved", chunks=2)),
    job_of(LLAMA, GridShape(pipe=2), 256, pipeline=PipelineOptions("1f1b"), dtype="bf16"),
    job_of(DEEP, GridShape(pipe=4), 128),
    job_of(LLAMA, GridShape(pipe=2, data=2), 128, pipeline=PipelineOptions("1f1b")),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions(defer_weights=False)),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("zero_bubble"), recompute="full"),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("1f1b"), recompute="every:2"),
    job_of(DEEP, GridShape(pipe=2), 128, pipeline=PipelineOptions("interleaved", chunks=2),
           recompute="every:3"),
    job_of(LLAMA, GridShape(pipe=2), 256, pipeline=PipelineOptions("1f1b"), recompute="attention"),
    job_of(DEEP, GridShape(pipe=2), 128, micro_batches=3),
    job_of(DEEP, GridShape(pipe=2, z=2), 128, overlap=Overlap(), pipeline=PipelineOptions("1f1b")),
]  # fmt: skip


def name_of(job: Job) -> str:
    options = job.options
    again = "" if options.recompute == "none" else f" recompute {options.recompute}"
    schedule = options.pipeline.schedule
    return f"{job.model.family} {job.grid.short()} {schedule} {options.dtype}{again}"


@pytest.mark.slow
@pytest.mark.parametrize("job", MEASURED, ids=name_of)
def test_peak_is_that_of_each_stage(pool, job) -> None:
    for stage, order, peak in pool(job.grid.size).run(run_step, job):
        planned = stage_memory_of(job, stage, device="cpu").total
        got = stage_memory_of(job, stage, device="cpu", order=order).total
        print(
            f"{name_of(job)}, stage {stage}: {got / peak - 1:+.1%} of {peak / MEGA:.0f} MB, "
            f"planned {planned / MEGA:.0f} MB"
        )
        assert got == pytest.approx(peak, rel=0.1)
        if job.options.pipeline.schedule != "message_driven":
            assert got == planned
            continue
        # The arrival of messages decides what runs next, so a stage may hold less than planned, or
        # defer a little more.
        assert peak <= 1.1 * planned
        most = max(units.in_flight for units in units_of(job, stage))
        held = fullest_units(order, defers=job.options.pipeline.defers)
        assert max(units.in_flight for units in held) <= most


# --- How it hangs together -----------------------------------------------------------------------

MODEL = ModelConfig(51200, 4096, 32, 32, 2048)


def planned(pipe: int, schedule: PipelineOptions, **options: object) -> Job:
    chosen = Options(micro_batches=16, pipeline=schedule, **options)  # type: ignore[arg-type]
    return Job(MODEL, GridShape(x=4, pipe=pipe), chosen, 16)


def most_in_flight(schedule: PipelineOptions, stage: int) -> int:
    return max(units.in_flight for units in units_of(planned(4, schedule), stage))


def test_units_are_those_of_the_schedules() -> None:
    in_flight = {
        "1f1b": [4, 3, 2, 1], "message_driven": [8, 6, 4, 1], "gpipe": [16] * 4,
        "zero_bubble": [4, 3, 2, 1],
    }  # fmt: skip
    for schedule, want in in_flight.items():
        options = PipelineOptions(schedule)
        assert [most_in_flight(options, stage) for stage in range(4)] == want, schedule
    interleaved = PipelineOptions("interleaved", chunks=2)
    assert [most_in_flight(interleaved, stage) for stage in range(4)] == [11, 9, 7, 5]
    late = units_of(planned(4, PipelineOptions("zero_bubble")), 3)
    assert max(units.in_flight + units.deferred for units in late) == 4
    limited = PipelineOptions(deferred_bytes=1)
    assert {units.deferred for units in units_of(planned(4, limited), 1)} == {1}


def test_deferred_weight_gradients_of_many_micro_batches_have_a_limit() -> None:
    options = Options(micro_batches=64, pipeline=PipelineOptions())
    job = Job(MODEL, GridShape(x=4, pipe=4), options, 64)
    costs = in_flight_module._stage_costs(job)
    run = simulate(
        "message_driven", [StageTimes(c, c, c) for c in costs], 64, defer_weights=True,
        in_flight=[8, 6, 4, 2], max_deferred=8,
    )  # fmt: skip
    assert run.peak_deferred[3] == 8, "the last stage never waits"
    for stage in range(4):
        found = max(units.deferred for units in units_of(job, stage))
        assert found <= 8 and found == pytest.approx(run.peak_deferred[stage], abs=2)


def test_what_a_stage_holds_follows_the_order_of_its_tasks() -> None:
    job, all_first = planned(4, PipelineOptions("1f1b")), planned(4, PipelineOptions("gpipe"))
    order = fixed_order("1f1b", stages=4, stage=0, micro_batches=16)
    assert stage_memory_of(job, 0, order=order) == stage_memory_of(job, 0)
    order = [Task(kind, 0, number) for kind in ("forward", "backward") for number in range(16)]
    assert stage_memory_of(job, 0, order=order) == stage_memory_of(all_first, 0)
    assert stage_memory_of(all_first, 0) != stage_memory_of(job, 0)


def test_the_fullest_stage_counts() -> None:
    for schedule in (PipelineOptions(), PipelineOptions("1f1b"), PipelineOptions("zero_bubble"),
                     PipelineOptions("interleaved", chunks=2), PipelineOptions("gpipe"),
                     PipelineOptions(defer_weights=False)):  # fmt: skip
        for recompute in ("none", "attention", "every:2", "full"):
            job = planned(4, schedule, recompute=recompute)
            stages = [stage_memory_of(job, stage).total for stage in range(4)]
            assert memory_of(job).total == max(stages), schedule


def test_what_saves_memory_saves_memory() -> None:
    def total(pipe: int, *schedule: object, **options: object) -> int:
        return memory_of(planned(pipe, PipelineOptions(*schedule), **options)).total

    assert total(8, "1f1b") < total(4, "1f1b") < total(4) < total(4, "gpipe")
    assert total(4, "1f1b", recompute="full") < total(4, "1f1b")
    first, last = (states_of(planned(4, PipelineOptions()), stage) for stage in (0, 3))
    assert first.parameters > 0.25 * states_of(planned(1, PipelineOptions())).parameters
    assert last.parameters > 0
