"""Initial values are bitwise the same on every grid, and no rank ever holds a full matrix."""

from __future__ import annotations

import hashlib

import pytest
import torch

from axonn_ext import GridShape, full_state_dict, initialize, models, nn
from grids import grid_of


def digests(shape: GridShape, family: str, dtype: torch.dtype) -> dict[str, str]:
    config = models.ModelConfig(
        family=family, vocab_size=64, hidden_size=32, num_layers=2, num_heads=8,
        num_kv_heads=4 if family == "llama" else None, sequence_length=8,
        intermediate_size=64, tie_embeddings=False,
    )  # fmt: skip
    model = models.build(config, grid_of(shape), seed=11, dtype=dtype)
    state = full_state_dict(model)
    return {
        name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bitwise_equal_on_different_grids(pool, family, dtype):
    reference = pool(1).run(digests, GridShape(), family, dtype)[0]
    assert len(set(reference.values())) > len(reference) // 2  # parameters do differ
    for world_size, shape in (
        (2, GridShape(z=2)),
        (4, GridShape(x=2, y=2)),
        (8, GridShape(x=2, y=2, z=2)),
        (8, GridShape(x=4, data=2)),
    ):
        for got in pool(world_size).run(digests, shape, family, dtype):
            assert got == reference, shape


def standalone(shape: GridShape) -> None:
    grid = grid_of(shape)
    make = lambda **options: nn.Linear(8, 16, grid=grid, role="expand", **options)  # noqa: E731
    first = full_state_dict(make())
    assert torch.equal(first["weight"], full_state_dict(make())["weight"])
    assert not torch.equal(first["weight"], full_state_dict(make(seed=1))["weight"])
    assert not torch.equal(first["weight"], full_state_dict(make(name="other"))["weight"])
    model = torch.nn.Sequential(make(), make())
    initialize(model, seed=0)
    state = full_state_dict(model)
    assert not torch.equal(state["0.weight"], state["1.weight"])
    assert torch.equal(state["0.weight"], full_state_dict(make(name="0"))["weight"])
    bound = 8**-0.5  # torch.nn.Linear's
    assert 0.9 * bound < first["weight"].abs().max() <= bound


def test_standalone_linears_are_keyed_by_seed_and_name(pool):
    pool(4).run(standalone, GridShape(x=2, z=2))


def peak_growth_bytes(shape: GridShape) -> int:
    """The growth of VmHWM while a 4096 x 4096 Linear is made, after a small one."""
    grid = grid_of(shape)

    def high_water_mark() -> int:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    nn.Linear(64, 64, grid=grid, role="expand")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the mark to the current resident size
    before = high_water_mark()
    layer = nn.Linear(4096, 4096, grid=grid, role="expand")
    growth = high_water_mark() - before
    assert layer.weight.nbytes == 4096 * 4096 * 4 // shape.size
    return growth


def test_no_rank_holds_a_matrix_that_the_grid_splits(pool):
    full = 4096 * 4096 * 4
    for growth in pool(8).run(peak_growth_bytes, GridShape(x=2, y=2, z=2)):
        # At least most of the shard itself, or the measurement did not work.
        assert full / 16 < growth < full / 4
