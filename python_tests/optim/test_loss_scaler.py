"""The loss scale: when it changes, its saved state, and its effect for AdamW in fp16."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from axonn_ext.optim import AdamW, LossScaler


def test_it_falls_at_overflow_and_rises_after_a_window_without() -> None:
    scaler = LossScaler(
        initial_loss_scale=16, min_loss_scale=4, max_loss_scale=32, loss_scale_window=3
    )
    found = []
    for overflow in (0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0):
        found.append(scaler.loss_scale)
        assert scaler.update(overflow=bool(overflow)) is bool(overflow)
    # Two clean steps before an overflow do not count; the scale stays between the bounds.
    assert found == [16, 16, 16, 8, 8, 8, 16, 16, 16, 32, 32, 32, 32, 16, 8, 4, 4, 4, 4]
    assert scaler.loss_scale == 8
    assert scaler.num_overflows == 5


def test_defaults() -> None:
    scaler = LossScaler()
    assert scaler.loss_scale == 2**16
    for _ in range(199):
        scaler.update(overflow=False)
    assert scaler.loss_scale == 2**16
    scaler.update(overflow=False)
    assert scaler.loss_scale == 2**17
    for _ in range(8 * 200):
        scaler.update(overflow=False)
    assert scaler.loss_scale == 2**24
    assert not scaler.is_least
    for _ in range(20):
        scaler.update(overflow=True)
    assert scaler.loss_scale == 2**10
    assert scaler.is_least


def test_a_state_goes_on_exactly_wherever_it_was_taken() -> None:
    pick = random.Random(3)
    overflows = [pick.random() < 0.1 for _ in range(300)]
    whole, states, scales = LossScaler(loss_scale_window=7), [], []
    for overflow in overflows:
        states.append(json.loads(json.dumps(whole.state_dict())))
        scales.append(whole.loss_scale)
        whole.update(overflow=overflow)
    assert len(set(scales)) > 4, "the scale has moved"
    for first in range(0, 300, 13):
        scaler = LossScaler(loss_scale_window=7)
        scaler.load_state_dict(states[first])
        for overflow, scale in zip(overflows[first:], scales[first:], strict=True):
            assert scaler.loss_scale == scale
            scaler.update(overflow=overflow)
        assert scaler.state_dict() == whole.state_dict()


def test_a_state_beyond_the_bounds_becomes_the_bound() -> None:
    state = LossScaler(initial_loss_scale=2**20).state_dict() | {"clean_steps": 150}
    scaler = LossScaler(max_loss_scale=2**17, loss_scale_window=100)
    scaler.load_state_dict(state)
    assert scaler.loss_scale == 2**17
    scaler.update(overflow=True)
    scaler.load_state_dict(state | {"loss_scale": 2.0**11})
    scaler.update(overflow=False)
    assert scaler.loss_scale == 2**12, "150 clean steps are more than the window"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_loss_scale": 512}, "got 1024, 512 and 1.67772e+07"),
        ({"initial_loss_scale": 2.0**25}, "got 1024, 3.35544e+07 and 1.67772e+07"),
        ({"min_loss_scale": 0}, "got 0, 65536"),
        ({"min_loss_scale": -1}, "got -1, 65536"),
        ({"initial_loss_scale": math.nan}, "got 1024, nan"),
        ({"max_loss_scale": math.inf}, "and inf"),
        ({"loss_scale_window": 0}, "loss_scale_window: expected at least 1, got 0"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LossScaler(**options)


@pytest.mark.parametrize(
    "change",
    [{"loss_scale": "big"}, {"loss_scale": 0.0}, {"loss_scale": math.inf}, {"clean_steps": -1},
     {"clean_steps": 1.5}, {"num_overflows": None}, None],
)  # fmt: skip
def test_another_state_is_refused_and_changes_nothing(change: dict[str, Any] | None) -> None:
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict: expected a positive number"):
        scaler.load_state_dict(None if change is None else before | change)  # type: ignore[arg-type]
    assert scaler.state_dict() == before


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def test_gradients_of_fp16_are_unscaled_in_fp32() -> None:
    """Unscaled in fp16, these gradients would all be zero: they are below 2**-25."""
    scale = 2.0**24
    low, wide = small_model(torch.float16), small_model(torch.float16).float()
    options = {"lr": 0.1, "eps": 1e-12, "weight_decay": 0.0}
    optimizer, reference = (AdamW(m.parameters(), **options) for m in (low, wide))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for ours, theirs in zip(low.parameters(), wide.parameters(), strict=True):
            scaled = torch.randn(ours.shape, generator=generator).mul_(1e-9 * scale).half()
            assert (scaled / scale == 0).all()
            ours.grad, theirs.grad = scaled.clone(), scaled.float() / scale
        optimizer.step(gradient_factor=1 / scale)
        reference.step()
        assert all(torch.equal(p.grad, p.grad.half()) for p in low.parameters())
    for ours, theirs in zip(low.parameters(), wide.parameters(), strict=True):
        # Scaling by a power of two causes no rounding, so both compute the same.
        assert torch.equal(optimizer.pieces_of(ours)[0].master, theirs)
        assert torch.equal(ours, theirs.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_factor_is_that_of_gradients_multiplied_before(dtype: torch.dtype) -> None:
    factor = 0.0371
    model = small_model(dtype)
    other = copy.deepcopy(model).to(torch.promote_types(dtype, torch.float32))
    optimizer, reference = (AdamW(m.parameters(), lr=0.1) for m in (model, other))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            gradient = torch.randn(ours.shape, generator=generator).to(dtype)
            ours.grad = gradient.clone()
            theirs.grad = gradient.to(theirs.dtype) * factor
        optimizer.step(gradient_factor=factor)
        reference.step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            (piece,) = optimizer.pieces_of(ours)
            torch.testing.assert_close(piece.master, theirs.detach(), rtol=1e-7, atol=1e-9)
            assert (piece.master is ours) == (dtype.itemsize >= 4)


def test_a_factor_without_any_gradient() -> None:
    model = small_model(torch.float16)
    before = copy.deepcopy(model.state_dict())
    AdamW(model.parameters(), lr=0.1).step(gradient_factor=0.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
