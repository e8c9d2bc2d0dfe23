"""Losses and gradients that are not finite are named; the step is skipped, or the run ends."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from axonn_ext import GridShape, clip_grad_norm_
from axonn_ext.nn import Linear
from axonn_ext.nn.linear import Linear as LinearModule
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import read_metrics
from axonn_ext.train.nonfinite import MOST_IN_A_ROW, NonFinite
from grids import grid_of
from trained_here import train_here


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Makes one element of one gradient infinite in these steps, counted from 1."""
    count = [0]
    real = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        count[0] += 1
        real(loss, *args, **kwargs)
        if count[0] in steps:
            (weight,) = (p for p in poisoned if p.grad is not None)
            weight.grad.view(-1)[3] = math.inf

    poisoned: list[nn.Parameter] = []
    init = LinearModule.__init__

    def remember(self: LinearModule, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        if len(poisoned) < 1:
            poisoned.append(self.weight)

    monkeypatch.setattr(LinearModule, "__init__", remember)
    monkeypatch.setattr(torch.Tensor, "backward", backward)


def test_the_run_ends_and_names_the_parameter(tmp_path, monkeypatch) -> None:
    poison(monkeypatch, {3})
    with pytest.raises(TrainingError) as raised:
        train_here(tmp_path / "run")
    name = r"blocks\.0\.attention\.qkv\.weight"
    assert re.match(
        rf"step 3: loss \d.*, gradient norm inf: not finite in the gradient of {name}; try a lower",
        str(raised.value),
    )


def test_a_step_is_skipped_and_counted(tmp_path, monkeypatch, capsys) -> None:
    poison(monkeypatch, {2, 3})
    train_here(tmp_path / "run", train__on_nonfinite="skip")
    out = capsys.readouterr().out
    assert out.count("skipped step ") == 2
    assert "skipped steps, whose loss or gradient was not finite: 2" in out
    steps = read_metrics(tmp_path / "run").steps
    assert [step.step for step in steps] == [1, 4, 5, 6]
    assert all(math.isfinite(step.loss) for step in steps), "the weights were not touched"


def test_a_run_that_does_not_recover_ends(tmp_path, monkeypatch) -> None:
    poison(monkeypatch, set(range(2, 100)))
    with pytest.raises(TrainingError, match=f"{MOST_IN_A_ROW} steps before it were skipped"):
        train_here(tmp_path / "run", train__on_nonfinite="skip", train__steps=20)


def names_on(shape: GridShape) -> str:
    grid = grid_of(shape)
    model = nn.ModuleDict(
        {name: Linear(8, 8, role="expand", grid=grid, bias=False) for name in "abc"}
    )
    for index, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(index + 1))
    clip_grad_norm_(model, 1e3)
    assert model["c"].weight.grad.flatten()[0] == 3, "not scaled up"
    if grid.rank == 1:
        model["b"].weight.grad[0, 0] = math.nan
    norm = clip_grad_norm_(model, 0.1)
    assert model["a"].weight.grad.flatten()[0] == 1, "not scaled"
    config = load_config(None, overrides=(Override("train.steps", "1"),))
    fine = NonFinite(config, model, None, grid=grid)
    try:
        fine.is_fine(1, 2.0, float(norm))
    except TrainingError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("shape", [GridShape(1, 1, 2), GridShape(1, 2, 2)])
def test_what_one_rank_has_is_named_on_all(pool, shape) -> None:
    messages = pool(shape.size).run(names_on, shape)
    want = "step 1: loss 2.0, gradient norm nan: not finite in the gradient of b.weight; try"
    assert all(message.startswith(want) for message in messages), messages


def test_only_steps_in_a_row_end_a_run() -> None:
    """A finite step resets the count."""
    overrides = (Override("train.steps", "1"), Override("train.on_nonfinite", "skip"))
    fine = NonFinite(load_config(None, overrides=overrides), nn.Linear(1, 1), None)
    for _ in range(3):
        assert not any(fine.is_fine(1, math.nan, 1.0) for _ in range(MOST_IN_A_ROW))
        assert fine.is_fine(2, 1.0, 1.0)
    assert fine.num_skipped == 3 * MOST_IN_A_ROW
