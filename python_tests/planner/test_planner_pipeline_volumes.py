"""The planner's communication with several stages: exactly the bytes that pipelines send.

The tests compare every rank's bytes on every axis. They do not count what pipelines send in
addition to data: the forms of first messages, which trace_communication omits, and the decisions of
message_driven and the totals of a step, which belong to no axis.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from axonn_ext import clip_grad_norm_, models, trace_communication
from axonn_ext.optim import AdamW
from axonn_ext.pipeline import MicroBatch, Pipeline
from axonn_ext.planner import Job, Options
from axonn_ext.planner.job import violations
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.volumes import bytes_by_axis, most_bytes_by_axis
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.spec.grid import COMMUNICATING, GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.stages import Stages
from grids import grid_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PIPELINES = (
    PipelineOptions(), PipelineOptions(defer_weights=False), PipelineOptions("1f1b"),
    PipelineOptions("gpipe"), PipelineOptions("zero_bubble"),
    PipelineOptions("interleaved", chunks=2), PipelineOptions("interleaved", chunks=3),
)  # fmt: skip


def random_model(rng: random.Random, layers: int) -> ModelConfig:
    family = rng.choice(FAMILIES)
    traits = find_family(family)
    grouped = traits.grouped_query
    return ModelConfig(
        vocab_size=rng.choice([64, 96]), hidden_size=rng.choice([32, 64]), num_layers=layers,
        num_heads=4, sequence_length=rng.choice([6, 8]), family=family,
        num_kv_heads=rng.choice([None, 2]) if grouped else None, tie_embeddings=rng.random() < 0.6,
        window=4 if traits.hugging_face.window_key else None,
    )  # fmt: skip


def random_job(rng: random.Random, pipe: int, num_ranks: int, layout: str) -> Job:
    """A legal job with this number of stages and ranks."""
    axes = {"x": 1, "y": 1, "z": 1, "data": 1}
    while math.prod(axes.values()) * pipe < num_ranks:
        axes[rng.choice(list(axes))] *= 2
    while True:
        options = Options(
            layout=layout, heads_over_y=layout == "sharded" and rng.random() < 0.3,
            save_gathered=rng.random() < 0.3, reshard_after_forward=rng.random() < 0.6,
            recompute=rng.choice(["none", "none", "attention", "every:2", "full"]), overlap=None,
            dtype=rng.choice(list(DTYPES)), micro_batches=pipe * rng.choice([1, 2]),
            pipeline=rng.choice(PIPELINES),
        )  # fmt: skip
        model = random_model(rng, rng.choice([pipe, pipe + 1, 2 * pipe + 1, 3 * pipe]))
        sequences = axes["data"] * axes["z"] * axes["y"] * options.micro_batches
        job = Job(model, GridShape(**axes, pipe=pipe), options, sequences * rng.choice([1, 2]))
        if not list(violations(job)):
            return job


def traced_bytes(job: Job) -> tuple[int, dict[str, int]]:
    """The stage of this rank, and the bytes by axis of a step of the real pipeline."""
    options, grid = job.options, grid_of(job.grid)
    stages = Stages.balanced(job.model, job.grid.pipe, options.pipeline.chunks)
    model = models.build(job.model, grid, options, dtype=DTYPES[options.dtype], stages=stages)
    ids = torch.zeros(job.rows, dtype=torch.long).view(-1, job.model.sequence_length)
    batches = [MicroBatch(ids, ids)] * options.micro_batches
    chosen = options.optimizer
    with Pipeline(model, grid, options.pipeline, overlap=options.overlap) as pipeline:
        optimizer = AdamW(
            model, lr=1e-3, zero=chosen.zero, bucket_elements=chosen.bucket_elements
        )  # fmt: skip
        for _ in range(1 if options.overlap is None else 2):  # the first step has no predictions
            with trace_communication() as trace:
                pipeline.step(batches, num_labels=1.0)
                pipeline.sync_gradients()
                clip_grad_norm_(pipeline.module, 1.0)
                optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    sent = {a: n for a, n in trace.bytes_by_axis().items() if n and a in COMMUNICATING}
    return grid.coords["pipe"], sent


def check(pool, job: Job) -> None:
    most: dict[str, int] = {}
    for stage, traced in pool(job.grid.size).run(traced_bytes, job):
        assert bytes_by_axis(make_program(job, stage)) == traced, (stage, job)
        most = {axis: max(most.get(axis, 0), traced.get(axis, 0)) for axis in {**most, **traced}}
    assert most_bytes_by_axis(job) == most


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("pipe", [2, 4])
def test_random_models_on_four_ranks(pool, pipe: int, layout: str) -> None:
    for seed in range(5):
        check(pool, random_job(random.Random(f"{pipe} {layout} {seed}"), pipe, 4, layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("pipe", [2, 4])
def test_random_models_on_eight_ranks(pool, pipe: int, layout: str) -> None:
    for seed in range(5):
        check(pool, random_job(random.Random(f"{pipe} {layout} {seed}"), pipe, 8, layout))


def test_rows_that_x_does_not_divide_are_sent_whole(pool) -> None:
    model = ModelConfig(64, 32, 2, 4, 5)
    options = Options(layout="replicated", overlap=None, dtype="fp32", micro_batches=2)
    job = Job(model, GridShape(x=2, pipe=2), options, 2)
    (message,) = make_program(job).messages
    assert message.num_bytes == 5 * 32 * 4
    check(pool, job)


@pytest.mark.parametrize("defer_weights", [False, True])
def test_with_overlap(pool, defer_weights: bool) -> None:
    """Without memory to keep weights, every use gathers, as in the program."""
    for tied in (False, True):
        model = ModelConfig(96, 32, 2, 4, 8, family="llama", tie_embeddings=tied)
        options = Options(
            dtype="fp32", overlap=Overlap(gathered_bytes=0), micro_batches=2,
            pipeline=PipelineOptions(defer_weights=defer_weights),
        )  # fmt: skip
        check(pool, Job(model, GridShape(z=2, pipe=2), options, 8))


@pytest.mark.parametrize("overlap", [None, Overlap(gathered_bytes=0)])
def test_with_zero(pool, overlap: Overlap | None) -> None:
    """A tied table, which both end stages hold, has its own buckets."""
    for tied in (False, True):
        model = ModelConfig(96, 40, 2, 4, 8, family="llama", tie_embeddings=tied)
        options = Options(
            dtype="fp32", overlap=overlap, micro_batches=2,
            optimizer=OptimizerOptions(1, bucket_elements=3000),
        )  # fmt: skip
        check(pool, Job(model, GridShape(data=2, pipe=2), options, 8))


def test_what_a_pipeline_cannot_split_is_refused() -> None:
    model = ModelConfig(64, 32, 3, 4, 8)
    job = Job(model, GridShape(pipe=4), Options(micro_batches=4), 4)
    assert list(violations(job)) == [
        "layers: 3 blocks cannot be split into pipe=4 * chunks=1 parts"
    ]
    interleaved = Options(micro_batches=3, pipeline=PipelineOptions("interleaved", chunks=2))
    model = dataclasses.replace(model, num_layers=4)
    (broken,) = violations(Job(model, GridShape(pipe=2), interleaved, 3))
    assert broken == "micro-batches of interleaved stages: 3 must be divisible by pipe=2"
