"""ZeRO: gradients and AdamW's state sharded over data, against the same training without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zero_cases
from axonn_ext import GridShape
from axonn_ext.spec.optimizer import OFFLOADS
from model_cases import LLAMA
from worker_pool import WorkerPool
from zero_cases import Setup

Pool = Callable[[int], WorkerPool]

GRIDS = [
    GridShape(data=2),
    GridShape(data=4),
    GridShape(x=2, data=2),
    GridShape(y=2, data=2),
    GridShape(z=2, data=2),
]


def check(pool: Pool, setup: Setup) -> None:
    for found in pool(setup.shape.size).run(zero_cases.compare, setup):
        assert found["left"] == 0  # no full gradients are left
        bound = zero_cases.CLOSE[setup.dtype]
        assert found["gradients"] < bound
        assert found["metrics"] < bound
        assert found["weights"] < zero_cases.CLOSE_WEIGHTS[setup.dtype]
        # Low-precision weights always have masters; fp32 weights get copies of their shards.
        masters = 1.5 if setup.dtype == torch.float32 else 1.0
        assert found["state"] < masters / setup.shape.data + 0.05


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("shape", GRIDS, ids=GridShape.short)
def test_as_without(pool: Pool, shape: GridShape, zero: int) -> None:
    # Each option has both values in some grid.
    overlap = shape.x == 1
    layout = "replicated" if shape.y == 2 else "sharded"
    config = LLAMA if shape.z == 2 or shape.x == 2 else zero_cases.GPT2
    check(
        pool,
        Setup(
            shape, zero, overlap=overlap, layout=layout, config=config,
            micro_batches=2 if shape.data == 2 else 1,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "zero", "options"),
    [
        (GridShape(data=2), 2, {"overlap": True}),
        (GridShape(data=2), 1, {"offload": "cpu", "dtype": torch.bfloat16}),
        (GridShape(z=2, data=2), 2, {"layout": "replicated"}),
        (GridShape(pipe=2, data=2), 1, {"micro_batches": 2}),
    ],
    ids=str,
)
def test_groups_of_parameters(pool: Pool, shape: GridShape, zero: int, options, tmp_path) -> None:
    """Some have factors or are frozen; checkpoints resume with the same options."""
    setup = Setup(shape, zero, groups=True, **options)
    check(pool, setup)
    saved = pool(shape.size).run(zero_cases.save, setup, tmp_path / "step-00000002")
    assert pool(shape.size).run(zero_cases.load, setup, tmp_path / "step-00000002") == saved


@pytest.mark.parametrize(("adapters", "recompute"), [(True, "none"), (False, "every:2")])
def test_adapters_and_recomputed_blocks(pool: Pool, adapters: bool, recompute: str) -> None:
    """Only some parameters have gradients, or gradients come after a second forward pass."""
    setup = Setup(
        GridShape(x=2, data=2), 2, overlap=True, micro_batches=2, adapters=adapters,
        recompute=recompute,
    )  # fmt: skip
    check(pool, setup)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("dtype", list(zero_cases.CLOSE))
@pytest.mark.parametrize(("index", "shape"), list(enumerate(GRIDS)))
def test_all_options(
    pool: Pool, index: int, shape: GridShape, dtype: torch.dtype, zero: int, overlap: bool,
    parts: int,
) -> None:  # fmt: skip
    # The place of the state alternates with the other options.
    offload = OFFLOADS[(index + zero + overlap + parts) % len(OFFLOADS)]
    setup = Setup(shape, zero, offload, dtype=dtype, overlap=overlap, micro_batches=parts)
    check(pool, setup)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_state_of_parts_on_the_host(pool: Pool, offload: str) -> None:
    check(pool, Setup(GridShape(data=2), 1, offload, dtype=torch.bfloat16))


@pytest.mark.parametrize("overlap", [False, True])
def test_stages_of_a_pipeline(pool: Pool, overlap: bool) -> None:
    """The table on both end stages is summed over them before it is sharded."""
    check(pool, Setup(GridShape(pipe=2, data=2), 1, overlap=overlap, micro_batches=4))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(GridShape(data=2), 1), Setup(GridShape(data=4), 2, overlap=True)),
        (Setup(GridShape(data=4), 1, "disk"), Setup(GridShape(x=2, y=2))),
        (Setup(GridShape(z=2, x=2)), Setup(GridShape(z=2, data=2), 1, "cpu")),
        (
            Setup(GridShape(pipe=2, data=2), 1, micro_batches=4),
            Setup(GridShape(data=2), 1, "cpu", overlap=True, micro_batches=4),
        ),
        (
            Setup(GridShape(pipe=2), micro_batches=2, groups=True),
            Setup(GridShape(y=2, data=2), 2, micro_batches=2, groups=True),
        ),
    ],
    ids=["data=2 to 4", "to none", "from none", "from stages", "groups from stages"],
)
def test_checkpoints_between_numbers_of_parts(
    pool: Pool, tmp_path: Path, before: Setup, after: Setup
) -> None:
    folder = tmp_path / "saved"
    saved = pool(before.shape.size).run(zero_cases.save, before, folder)[0]
    loaded = pool(after.shape.size).run(zero_cases.load, after, folder)[0]
    for one, other in zip(saved, loaded, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_refusals(pool: Pool) -> None:
    for found in pool(4).run(zero_cases.refusals):
        order, parameters, twice, unknown = found
        assert "zero=2 sums the gradients of each backward pass" in order
        assert "zero=1 needs a module" in parameters
        assert "has another optimizer with ZeRO already" in twice
        assert "zero must be 0, 1 or 2, got 3" in unknown


@pytest.mark.parametrize("overlap", [False, True])
def test_tied_table_that_is_gathered(pool: Pool, overlap: bool) -> None:
    """Its two gradients are added, then summed over z, and then over data."""
    check(pool, Setup(GridShape(z=2, data=2), 2, overlap=overlap, micro_batches=2))
