"""Muon on every grid against torch.optim.Muon on whole matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import muon_cases
import zero_cases
from axonn_ext import GridShape
from axonn_ext.spec.buckets import whole_cuts
from axonn_ext.spec.optimizer import ADJUSTMENTS
from grids import factorisations
from model_cases import GPT2, LLAMA
from worker_pool import WorkerPool
from zero_cases import Setup

Pool = Callable[[int], WorkerPool]
GRIDS = [
    *factorisations(2),
    *factorisations(4),
    GridShape(2, 2, 2),
    GridShape(2, 2, 1, 2),
    GridShape(1, 2, 2, 2),
    GridShape(2, 1, 2, 2),
]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_orthogonalised_blocks_are_those_of_the_whole_matrix(pool: Pool, world_size: int) -> None:
    padded = 0
    for shape in GRIDS if world_size == 8 else factorisations(world_size):
        if shape.size != world_size:
            continue
        algorithm = "sequential" if shape.y > 1 else "auto"
        (first, *_) = pool(world_size).run(muon_cases.orthogonal_errors, shape, algorithm)
        assert first and max(error for error, _ in first) < 1e-13
        padded += sum(padding for _, padding in first)
    assert padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("number", range(len(GRIDS)), ids=[g.short() for g in GRIDS])
def test_as_torch_within_rounding(pool: Pool, number: int, layout: str, dtype: torch.dtype) -> None:
    shape = GRIDS[number]
    config = (GPT2, LLAMA)[number % 2]
    adjust_lr = ADJUSTMENTS[number // 2 % 2]
    for found in pool(shape.size).run(
        muon_cases.against_torch, shape, config, layout, dtype, adjust_lr
    ):
        # Both round every product to bf16, which is 12% of an update: gradients have few large
        # singular values, and rounding errors in the other directions grow like small ones.
        assert all(ours <= 2 * torchs for ours, torchs in found["errors"]), found["errors"]
        assert found["others"] < 1e-5 and found["cast"] and found["momentum"]


def test_one_rank_has_torchs_bits(pool: Pool) -> None:
    for dtype, adjust_lr in zip((torch.float32, torch.bfloat16), ADJUSTMENTS, strict=True):
        for shape in (GridShape(), GridShape(data=2)):
            (found, *_) = pool(shape.size).run(
                muon_cases.against_torch, shape, LLAMA, "sharded", dtype, adjust_lr
            )
            assert found["same"]


def test_groups_are_those_of_torch(pool: Pool) -> None:
    assert pool(1).run(muon_cases.groups_are_torchs) == [True]


DEEP = dataclasses.replace(GPT2, num_layers=3)
ZERO_GRIDS = [GridShape(data=2), GridShape(x=2, data=2), GridShape(z=2, data=2), GridShape(data=4)]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("shape", ZERO_GRIDS, ids=GridShape.short)
def test_zero_trains_as_without_and_has_a_part_of_the_state(
    pool: Pool, shape: GridShape, zero: int
) -> None:
    dtype = torch.bfloat16 if shape.x > 1 else torch.float32
    setup = Setup(
        shape, zero, muon=True, overlap=shape.z > 1, micro_batches=zero, config=LLAMA, dtype=dtype
    )
    for found in pool(shape.size).run(zero_cases.compare, setup):
        assert found["left"] == 0
        assert found["gradients"] < zero_cases.CLOSE[dtype]
        # Gradients that differ in their last bits make updates differ by the roundings of bf16,
        # 12% of four updates of 10% of a weight.
        assert found["metrics"] < max(zero_cases.CLOSE[dtype], 2e-3)
        assert found["weights"] < max(zero_cases.CLOSE_WEIGHTS[dtype], 0.1)
        masters = 2.0 if dtype == torch.float32 else 1.0
        assert found["state"] < masters / shape.data + 0.05


def test_stages(pool: Pool) -> None:
    setup = Setup(GridShape(pipe=2, data=2), 1, muon=True, micro_batches=2)
    for found in pool(4).run(zero_cases.compare, setup):
        assert found["metrics"] < 2e-3 and found["weights"] < 0.1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(GridShape(x=2)), Setup(GridShape(z=2))),
        (Setup(GridShape(data=2), 1), Setup(GridShape(x=2, z=2))),
        (Setup(GridShape(y=2, data=2), 2), Setup(GridShape(data=2), 1)),
        (Setup(GridShape(x=2)), Setup(GridShape(pipe=2, data=2), 1, micro_batches=2)),
        # A stage in the middle has no vectors for AdamW but norms; masters are copies.
        (
            Setup(GridShape(pipe=3), config=DEEP, dtype=torch.bfloat16, micro_batches=2),
            Setup(GridShape(data=2), config=DEEP, dtype=torch.bfloat16),
        ),
        (
            Setup(GridShape(z=2), config=DEEP),
            Setup(GridShape(pipe=3), config=DEEP, micro_batches=2),
        ),
    ],
    ids=str,
)
def test_a_checkpoint_continues_on_another_grid(
    pool: Pool, tmp_path: Path, before: Setup, after: Setup
) -> None:
    first, second = (zero_cases.with_muon(setup) for setup in (before, after))
    folder = tmp_path / "checkpoint"
    saved = pool(first.shape.size).run(zero_cases.save, first, folder)[0]
    loaded = pool(second.shape.size).run(zero_cases.load, second, folder)[0]
    for one, other in zip(saved, loaded, strict=True):
        assert other == pytest.approx(one, rel=max(2e-3, zero_cases.CLOSE[before.dtype]))


def test_adamws_state_is_refused(pool: Pool, tmp_path: Path) -> None:
    setup, folder = Setup(GridShape(x=2)), tmp_path / "checkpoint"
    pool(2).run(zero_cases.save, setup, folder)
    with pytest.raises(AssertionError, match="an optimizer with 2 groups of parameters"):
        pool(2).run(zero_cases.load, zero_cases.with_muon(setup), folder)


def test_errors(pool: Pool) -> None:
    wanted = (
        "momentum must be in [0, 1), got 1.0",
        "ema_decay must be in [0, 1), got 1.0",
        "adjust_lr must be one of match_rms_adamw, original, got 'big'",
        "zero must be 0, 1 or 2, got 3",
        "with pipe > 1 use zero=1",
        "must have two dimensions, got blocks.",
        "must be parameters of the module, got 1 others, one of shape [3, 5]",
    )
    for found in pool(4).run(muon_cases.refusals):
        for said, part in zip(found, wanted, strict=True):
            assert part in said


def test_whole_parameters_in_buckets() -> None:
    buckets = list(whole_cuts([64, 100, 64, 64, 100], num_parts=2))
    assert [[c.number for c in cuts] for cuts, _ in buckets] == [[0, 2], [1, 4], [3]]
    assert [numel for _, numel in buckets] == [128, 256, 128]
    assert all(c.start == 0 for cuts, _ in buckets for c in cuts)
    assert [c.at for cuts, _ in buckets for c in cuts] == [0, 64, 0, 128, 0]
    shared = list(whole_cuts([64, 200, 3], num_parts=4))
    assert [(c.number, c.at) for c in shared[0][0]] == [(1, 0), (0, 256), (2, 512)]
