"""The planner's communication: exactly the bytes that the real modules send."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext import Grid, clip_grad_norm_, models, sync_gradients, trace_communication
from axonn_ext.optim import AdamW
from axonn_ext.optim.muon import Muon
from axonn_ext.optim.zero import buckets_of
from axonn_ext.overlap import Orchestrator
from axonn_ext.planner import Job, Options
from axonn_ext.planner.job import violations
from axonn_ext.planner.step.parameters import parameters_of_rank
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.volumes import bytes_by_axis
from axonn_ext.spec.buckets import aligned, bucket_sizes
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import MUON, OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from fake_ranks import fake_ranks
from grids import grid_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POLICIES = ("none", "attention", "every:2", "every:3", "every:3/4", "full")
SMALL = ModelConfig(96, 32, 2, 4, 8, family="llama", num_kv_heads=2, tie_embeddings=False)


def random_job(
    rng: random.Random, layout: str, *, optimizer: OptimizerOptions | None = None, **chosen: object
) -> Job:
    """A legal job on 2 to 4,096 ranks, with a random family and random options except `chosen`.

    With ZeRO, a bucket has a fraction of the rank's parameters, so that many of them are split.
    """
    optimizer = optimizer or OptimizerOptions()
    while True:
        family, heads = rng.choice(["gpt2", "llama"]), rng.choice([4, 8, 16, 24, 64])
        model = ModelConfig(
            vocab_size=rng.choice([64, 97, 512, 4099]),
            hidden_size=heads * rng.choice([8, 16]),
            num_layers=rng.choice([1, 2, 3]),
            num_heads=heads,
            sequence_length=rng.choice([8, 12, 32, 64]),
            family=family,
            num_kv_heads=heads if family == "gpt2" else heads // rng.choice([1, 2, 4]),
            tie_embeddings=rng.random() < 0.5,
        )
        sizes = [rng.choice([1, 1, 2, 3, 4, 8, 16]) for _ in range(4)]
        if optimizer.zero:
            sizes[3] = rng.choice([2, 3, 4])
        grid = GridShape(*sizes)
        options: Options = Options(
            layout=layout,
            heads_over_y=layout == "sharded" and rng.random() < 0.3,
            save_gathered=rng.random() < 0.5,
            reshard_after_forward=rng.random() < 0.5,
            recompute=rng.choice(["none", "attention", "every:2", "every:2/3", "full"]),
            overlap=None,
            micro_batches=rng.choice([1, 1, 2]),
            dtype=rng.choice(list(DTYPES)),
            optimizer=optimizer,
        )
        options = dataclasses.replace(options, **chosen)  # type: ignore[arg-type]
        sequences = rng.choice([1, 2, 4]) * grid.data * grid.z * grid.y * options.micro_batches
        job = Job(model, grid, options, sequences)
        if 2 <= grid.size <= 4096 and not list(violations(job)):
            if optimizer.zero:
                elements = max(1, parameters_of_rank(job) // rng.choice([1, 3, 11]))
                cut = dataclasses.replace(optimizer, bucket_elements=elements)
                job = dataclasses.replace(job, options=dataclasses.replace(options, optimizer=cut))
            return job


def adamw_of(job: Job, model: models.Transformer) -> AdamW:
    chosen = job.options.optimizer
    if chosen.is_muon:
        return Muon(
            model, matrices=model.hidden_matrices(), lr=1e-3, zero=chosen.zero,
            bucket_elements=chosen.bucket_elements,
        )  # fmt: skip
    return AdamW(
        model, lr=1e-3, zero=chosen.zero, offload=chosen.offload,
        bucket_elements=chosen.bucket_elements,
    )  # fmt: skip


def traced_bytes(job: Job, grid: Grid, *, fake: bool) -> dict[str, int]:
    """The bytes by axis of a step of the real modules, as the trainer runs it."""
    options, shape = job.options, job.grid
    config = job.model
    with FakeTensorMode() if fake else nullcontext(), trace_communication() as trace:
        model = models.build(config, grid, options, dtype=DTYPES[options.dtype])
        optimizer = adamw_of(job, model)
        ids = torch.zeros(
            job.micro_batch_size // (shape.data * shape.z), config.sequence_length, dtype=torch.long
        )
        for _ in range(options.micro_batches):
            model.loss(ids, ids, 1.0).backward()
        sync_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    return {axis: sent for axis, sent in trace.bytes_by_axis().items() if sent}


def check(job: Job, rank: int = -1) -> None:
    with fake_ranks(rank % job.grid.size, job.grid.size):
        traced = traced_bytes(job, Grid(**job.grid.as_dict()), fake=True)
    assert bytes_by_axis(make_program(job)) == traced, job


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("seed", range(6))
def test_random_models_on_up_to_4096_ranks(layout: str, seed: int) -> None:
    check(random_job(random.Random(f"{layout} {seed}"), layout))


@pytest.mark.parametrize(
    "chosen",
    [
        {"optimizer": OptimizerOptions(1)},
        {"optimizer": OptimizerOptions(2)},
        {"optimizer": OptimizerOptions(2), "micro_batches": 3},
        {"dtype": "fp16"},
        *(
            {"recompute": p}
            for p in ("none", "attention", "every:2", "every:3", "every:3/4", "full")
        ),
    ],
    ids=str,
)
def test_random_models_with_each_option(chosen: dict[str, Any]) -> None:
    rng = random.Random(str(chosen))
    for layout in ("sharded", "replicated"):
        check(random_job(rng, layout, **chosen))


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_random_models_with_muon(zero: int, seed: int) -> None:
    """The first rank of data orthogonalises the most matrices."""
    rng = random.Random(f"muon {zero} {seed}")
    for layout in ("sharded", "replicated"):
        check(random_job(rng, layout, optimizer=OptimizerOptions(zero, name=MUON)), rank=0)


def test_matrices_that_muon_pads() -> None:
    """Nine ranks split the rows of [18, 6] and [36, 6], whose Gram matrices have 6 columns."""
    model = ModelConfig(81, 6, 2, 3, 4, family="llama", num_kv_heads=3, intermediate_size=18)
    options = Options(overlap=None, dtype="fp32", optimizer=OptimizerOptions(name=MUON))
    job = Job(model, GridShape(3, 1, 3, 2), options, 18)
    assert not list(violations(job))
    check(job, rank=0)


def test_sizes_of_buckets_are_those_of_zero() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.choice([1, 63, 64, 65, rng.randrange(1, 5000)]) for _ in range(9)]
        parts, elements = rng.choice([1, 2, 3, 8]), rng.randrange(1, 9000)
        parameters = [torch.nn.Parameter(torch.empty(n)) for n in sizes]
        buckets = buckets_of(parameters, elements=elements, num_parts=parts)
        want = [bucket.numel for bucket in buckets]
        found = bucket_sizes(sum(map(aligned, sizes)), elements=elements, num_parts=parts)
        assert list(found.each()) == want
        assert (found.total, found.largest) == (sum(want), max(want))


def test_a_grid_of_4096_ranks_in_both_layouts() -> None:
    model = ModelConfig(4096, 512, 2, 32, 64)
    for layout in ("sharded", "replicated"):
        job = Job(
            model, GridShape(16, 4, 8, 8), Options(layout=layout, overlap=None), batch_size=512
        )
        assert not list(violations(job))
        with fake_ranks(4095, 4096):
            traced = traced_bytes(job, Grid(16, 4, 8, 8), fake=True)
        assert bytes_by_axis(make_program(job)) == traced


def overlapped_bytes(job: Job) -> dict[str, int]:
    """The bytes with the orchestrator: its first step without predictions, and one with them."""
    grid, options = grid_of(job.grid), job.options
    parallel = models.ParallelConfig(recompute=options.recompute)
    model = models.build(job.model, grid, parallel, dtype=DTYPES[options.dtype])
    ids = torch.zeros(job.micro_batch_size // grid.num_parts(["data", "z"]), 8, dtype=torch.long)
    assert options.overlap is not None
    with Orchestrator(model, options.overlap) as orchestrator:
        optimizer = adamw_of(job, model)
        for _ in range(2):
            with trace_communication() as trace:
                for part in range(options.micro_batches):
                    last = part == options.micro_batches - 1
                    with nullcontext() if last else orchestrator.no_sync():
                        model.loss(ids, ids, 1.0).backward()
                orchestrator.sync_gradients()
                clip_grad_norm_(model, 1.0)
                optimizer.step()
            optimizer.zero_grad()
            orchestrator.end_step()
        optimizer.close()
    return {axis: sent for axis, sent in trace.bytes_by_axis().items() if sent}


def overlapped_jobs() -> list[Job]:
    """Jobs without memory to keep weights, so every use gathers, as in the program; one bucket."""
    jobs = []
    for i, sizes in enumerate(((1, 1, 4, 1), (1, 1, 2, 2), (2, 1, 2, 1))):
        for j, recompute in list(enumerate(("none", "attention", "every:2", "full")))[i % 2 :: 2]:
            options = Options(dtype="fp32", overlap=Overlap(gathered_bytes=0), recompute=recompute)
            model = dataclasses.replace(SMALL, tie_embeddings=(i + j // 2) % 2 == 1)
            jobs.append(Job(model, GridShape(*sizes), options, batch_size=8))
    return jobs


def zero_jobs() -> list[Job]:
    """The same with ZeRO, whose buckets split parameters."""
    jobs = []
    others = ("fp32", 1, True, "cpu"), ("bf16", 3, False, "none")
    for i, sizes in enumerate(((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 1, 2))):
        dtype, parts, tied, place = others[i // 2]
        options = Options(
            dtype=dtype, overlap=Overlap(gathered_bytes=0), micro_batches=parts,
            optimizer=OptimizerOptions(1 + i % 2, place, bucket_elements=5000),
        )  # fmt: skip
        model = dataclasses.replace(SMALL, tie_embeddings=tied, hidden_size=40)
        jobs.append(Job(model, GridShape(*sizes), options, batch_size=8 * parts))
    return jobs


@pytest.mark.parametrize("jobs", [overlapped_jobs, zero_jobs])
def test_steps_with_overlap(pool, jobs: Callable[[], list[Job]]) -> None:
    for job in jobs():
        assert not list(violations(job))
        predicted = bytes_by_axis(make_program(job))
        for traced in pool(4).run(overlapped_bytes, job):
            assert traced == predicted, job
