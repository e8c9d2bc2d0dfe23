"""check_same_on_all_ranks: differences between ranks in a user's own model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axonn_ext import Grid, GridShape, check_same_on_all_ranks, parallelize
from grids import grid_of


class Model(nn.Module):
    """A small model in which one thing differs."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        torch.manual_seed(5 if change == "seed" else 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.register_buffer("scale", torch.full((2,), 3.0 if change == "buffer" else 2.0))
        with torch.no_grad():
            if change == "bit":
                self.body[1].weight[3, 5] = torch.nextafter(
                    self.body[1].weight[3, 5], torch.tensor(9.0)
                )
        if change == "shape":
            self.body[1] = nn.Linear(6, 5)
        if change == "dtype":
            self.body[0].half()
        if change == "frozen":
            self.body[0].weight.requires_grad_(False)
        if change == "name":
            self.extra = nn.Parameter(torch.zeros(1))


EXPECTED = {
    "seed": "body.0.weight is float32 [6, 4] ",
    "buffer": "scale is float32 [2] ",
    "bit": "check_same_on_all_ranks: body.1.weight is float32 [4, 6] ",
    "shape": "body.1.weight is float32 [5, 6] ",
    "dtype": "body.0.weight is float16 [6, 4] ",
    "frozen": "body.0.weight is frozen float32 [6, 4] ",
    "name": "extra is float32 [1] ",
}


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:  # the tests check which
        return f"{type(error).__name__}: {error}"
    return ""


def compare_models(change: str, other: int) -> str:
    model = Model(change if dist.get_rank() == other else "")
    return error_of(lambda: check_same_on_all_ranks(model))


@pytest.mark.parametrize("change", [*EXPECTED, ""])
def test_models_that_differ_are_named_on_every_rank(pool, change: str) -> None:
    for text in pool(4).run(compare_models, change, 2):
        assert ("on rank 2, but " in text and " on ranks 0, 1, 3" in text) == bool(change), text
        if change:
            assert EXPECTED[change] in text, text


def compare_values() -> list[str]:
    rank = dist.get_rank()
    weights = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weights], lr=1e-3 if rank else 1e-2)
    weights.grad = torch.full((3,), float(rank))
    optimizer.step()
    return [
        error_of(lambda: check_same_on_all_ranks({"lr": (rank + 1) / 10, "seed": 3})),
        error_of(lambda: check_same_on_all_ranks({"bits": torch.empty(0), "none": None})),
        error_of(lambda: check_same_on_all_ranks(optimizer.state_dict())),
        error_of(lambda: check_same_on_all_ranks({"of": rank % 2}, ranks=[rank % 2, rank % 2 + 2])),
    ]


def test_values_that_differ_are_named(pool) -> None:
    for scalars, equal, optimizer, halves in pool(4).run(compare_values):
        assert "lr is 0.2 on rank 1, 0.3 on rank 2, 0.4 on rank 3, but 0.1 on rank 0" in scalars
        assert "seed" not in scalars and not equal and not halves
        assert "param_groups.0.lr is 0.01 on rank 0, but 0.001 on ranks 1-3" in optimizer
        assert "state.0.exp_avg is float32 [3] " in optimizer


def refuse() -> list[str]:
    rank, grid = dist.get_rank(), grid_of(GridShape(x=2))
    placed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    torch.manual_seed(0)
    for parameter in placed.parameters():
        nn.init.normal_(parameter)
    parallelize(placed, grid, verbose=False)
    lazy = nn.LazyLinear(3) if rank == 1 else nn.Linear(2, 3)
    return [
        error_of(lambda: check_same_on_all_ranks(placed)),
        error_of(lambda: check_same_on_all_ranks(lazy)),
        error_of(lambda: check_same_on_all_ranks({"what": object() if rank == 1 else 1})),
    ]


def test_what_cannot_be_compared_is_refused_on_every_rank(pool) -> None:
    first, second = pool(2).run(refuse)
    assert "ValueError: check_same_on_all_ranks: 0 is on a grid" in first[0]
    assert "ValueError: check_same_on_all_ranks: weight has no shape yet" in second[1]
    assert "TypeError: check_same_on_all_ranks: what must be a tensor" in second[2]
    for text in first[1:]:
        assert "RanksFailed: check_same_on_all_ranks: rank 1 raised an error" in text


def make_other_grids() -> list[str]:
    rank = dist.get_rank()
    shape = {"x": 2} if rank == 0 else {"z": 2}
    found = [error_of(lambda: Grid(**shape))]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("AXONN_DEBUG_COLLECTIVES", "1")
        found.append(error_of(lambda: Grid(x=2)))
    return [*found, error_of(lambda: Grid(x=2))]


def test_grids_and_settings_that_differ_are_named(pool) -> None:
    for shapes, settings, equal in pool(2).run(make_other_grids):
        assert "Grid: size of x is 1 on rank 1, but 2 on rank 0" in shapes
        assert "Grid: size of z is 2 on rank 1, but 1 on rank 0" in shapes
        assert "Grid: AXONN_DEBUG_COLLECTIVES is 1 on rank 1, but 0 on rank 0" in settings
        assert not equal
