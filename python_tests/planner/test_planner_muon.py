"""Muon in the planner: operations, state, memory, and the time of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from axonn_ext import Grid, clip_grad_norm_, models
from axonn_ext.bench.loss import peak_bytes
from axonn_ext.optim.muon import Muon
from axonn_ext.planner import Job, Options, simulate, timeline
from axonn_ext.planner.job import violations
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.memory.states import states_of
from axonn_ext.planner.search.optimizers import optimizers_of
from axonn_ext.planner.step.program import make_program
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import MUON, OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from fake_ranks import fake_ranks
from planner_machines import machine_of

MODEL = ModelConfig(512, 256, 12, 8, 128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def job_of(grid: GridShape, zero: int = 0, model: ModelConfig = MODEL, **options: object) -> Job:
    chosen = {"overlap": None, "dtype": "fp32"} | options
    optimizer = OptimizerOptions(zero, bucket_elements=400_000, name=MUON)
    job = Job(model, grid, Options(optimizer=optimizer, **chosen), 64)  # type: ignore[arg-type]
    assert not list(violations(job))
    return job


def muon_of(job: Job, model: models.Transformer) -> Muon:
    chosen = job.options.optimizer
    return Muon(
        model, matrices=model.hidden_matrices(), lr=1e-3, zero=chosen.zero,
        bucket_elements=chosen.bucket_elements,
    )  # fmt: skip


def test_operations_are_those_that_torch_counts() -> None:
    job = job_of(GridShape(), model=ModelConfig(64, 48, 2, 4, 8, family="llama", num_kv_heads=2))
    with fake_ranks(0, 1), FakeTensorMode():
        model = models.build(job.model, Grid())
        optimizer = muon_of(job, model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
    assert make_program(job).optimizer.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_divide_the_operations(zero: int) -> None:
    whole = make_program(job_of(GridShape())).optimizer.flops
    for grid in (GridShape(2, 2, 2, 4), GridShape(z=8, data=2), GridShape(4, 1, 2)):
        assert make_program(job_of(grid, zero)).optimizer.flops * grid.size == whole


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_state_is_that_of_the_optimizer(zero: int, dtype: str) -> None:
    for grid in (GridShape(2, 1, 2, 2), GridShape(data=8)):  # 3 layers are not full buckets
        job = job_of(grid, zero, dataclasses.replace(MODEL, num_layers=3), dtype=dtype)
        with fake_ranks(0, grid.size), FakeTensorMode():
            model = models.build(job.model, Grid(**grid.as_dict()), dtype=DTYPES[dtype])
            optimizer = muon_of(job, model)
            kept = [t for p in optimizer.pieces for t in (p.master, *p.state.values()) if t.dim()]
            kept = [t for t in kept if not isinstance(t, torch.nn.Parameter)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
            others = len(list(model.parameters())) - len(model.hidden_matrices())
            optimizer.close()
        assert sum(storages.values()) == states_of(job).optimizer - 4 * others, (job, grid)


def test_momentum_is_half_of_two_moments() -> None:
    muon, adamw = (
        states_of(
            dataclasses.replace(
                job_of(GridShape(2, 2, 2)), options=Options(optimizer=OptimizerOptions(name=name),
                                                            dtype="fp32")
            )
        ).optimizer
        for name in (MUON, "adamw")
    )  # fmt: skip
    blocks = 12 * 12 * 256 * 256 // 8
    assert adamw - muon == 4 * blocks + 4 * 48  # a step count for each of 48 matrices


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_peak_of_a_step_on_one_rank(dtype: str) -> None:
    model = ModelConfig(64, 512, 2, 8, 8)
    job = dataclasses.replace(job_of(GridShape(), model=model, dtype=dtype), batch_size=8)
    with fake_ranks(0, 1):

        def train() -> None:
            module = models.build(model, Grid(), dtype=DTYPES[dtype])
            optimizer = muon_of(job, module)
            ids = torch.zeros(8, 8, dtype=torch.long)
            module.loss(ids, ids, 1.0).backward()
            clip_grad_norm_(module, 1.0)
            optimizer.step()

        found = peak_bytes(train, "cpu")
    assert memory_of(job, device="cpu").total == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("overlap", [None, Overlap()])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_quick_simulation_is_the_whole_one(zero: int, overlap: Overlap | None) -> None:
    for grid in (GridShape(1, 1, 2, 4), GridShape(2, 2, 1, 8), GridShape(x=2)):
        job, machine = job_of(grid, zero, overlap=overlap, dtype="bf16"), machine_of()
        quick, whole = simulate(job, machine), timeline(job, machine)
        assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=0.02), job
        waited = sum(whole.exposed_s.values())
        assert whole.step_time_s == pytest.approx(whole.compute_s + waited)
        adamw = dataclasses.replace(job.options.optimizer, name="adamw")
        other = dataclasses.replace(job, options=dataclasses.replace(job.options, optimizer=adamw))
        assert simulate(other, machine).step_time_s < quick.step_time_s


def test_offload_is_refused_and_not_searched() -> None:
    with pytest.raises(ValueError, match="offload must be none with optimizer muon, got 'cpu'"):
        OptimizerOptions(offload="cpu", name=MUON)
    with pytest.raises(ValueError, match="name must be one of adamw, muon, got 'sgd'"):
        OptimizerOptions(name="sgd")
    found = optimizers_of(OptimizerOptions(name=MUON), (0, 1), ("none", "cpu"))
    assert [(o.zero, o.offload) for o in found] == [(0, "none"), (1, "none")]
