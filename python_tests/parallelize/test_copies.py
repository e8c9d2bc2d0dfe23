"""The warning about ranks that train different models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import axonn_ext
from axonn_ext import GridShape, parallelize
from grids import grid_of

SIZE = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 32), nn.Linear(32, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def warnings_of(shape: GridShape, mistake: str) -> list[str]:
    """The warnings of three steps with a mistake, or without one; the first changes nothing."""
    grid = grid_of(shape)
    torch.manual_seed(3)
    model = parallelize(Block(), grid, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = grid.shard(torch.randn(8, SIZE), {0: ("data", "z")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 if step else 0.0
            loss = model(rows).square().sum() / 8
            loss.backward()
            if mistake != "no sum":
                axonn_ext.sync_gradients(model)
            if mistake == "torch's norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            else:
                axonn_ext.clip_grad_norm_(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(rows)
    return [str(each.message) for each in caught if "parallelize" in str(each.message)]


GRIDS = [GridShape(x=2), GridShape(y=2), GridShape(z=2), GridShape(data=2), GridShape(2, 1, 2)]


@pytest.mark.parametrize("shape", GRIDS, ids=GridShape.short)
def test_a_right_loop_is_not_warned(shape: GridShape, pool) -> None:
    assert not any(pool(shape.size).run(warnings_of, shape, ""))


@pytest.mark.parametrize(
    ("shape", "mistake", "ranks"),
    [
        (GridShape(z=2), "no sum", "ranks 0, 1"),
        (GridShape(data=2), "no sum", "ranks 0, 1"),
        (GridShape(x=2), "torch's norm", "ranks 0, 1"),
        (GridShape(x=2, data=2), "no sum", "ranks 0, 2"),
    ],
    ids=str,
)
def test_a_loop_that_trains_different_models_is_warned(shape, mistake, ranks, pool) -> None:
    every = [text for found in pool(shape.size).run(warnings_of, shape, mistake) for text in found]
    assert sum(ranks in text for text in every) == 1, every
    assert all("call axonn_ext.sync_gradients(model), and clip by" in text for text in every)


def call_on_one_rank(shape: GridShape) -> bool:
    """Whether one rank of data can use a trained model with gradients while the other does not."""
    grid = grid_of(shape)
    torch.manual_seed(3)
    model = parallelize(Block(), grid, verbose=False)
    rows = torch.randn(8, SIZE)
    model(rows).sum().backward()
    axonn_ext.sync_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return grid.rank == 1 or model(rows).isfinite().all().item()


def test_no_rank_waits_for_another(pool) -> None:
    assert all(pool(2).run(call_on_one_rank, GridShape(data=2)))
