"""AdamW with master weights, and the schedule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from axonn_ext.optim import AdamW, Schedule
from axonn_ext.spec.optimizer import SCHEDULES

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


def test_fp32_is_torch_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(ours.parameters(), weight_decay=0.5, **OPTIONS)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        **OPTIONS,
    )
    for step in range(5):
        for model in (ours, theirs):
            set_gradients(model, step)
        lr = OPTIONS["lr"] / (1 + step)
        for group in reference.param_groups:
            group["lr"] = lr
        optimizer.step(lr)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_decay_leaves_vectors_alone() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_bf16_keeps_updates_that_bf16_would_lose() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(100):  # each update is 1e-4; next to 1, bf16 has steps of 2**-8 and 2**-7
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    (piece,) = optimizer.pieces
    master = piece.master
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((4, 4), 0.99), rtol=1e-5, atol=0)
    torch.testing.assert_close(weight.detach(), master.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_resumes_exactly(dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    resumed = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer.state_dict())
    other = {"lr": 1.0, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.9}
    second = AdamW(resumed.parameters(), **other)
    second.load_state_dict(saved)
    assert second.options == optimizer.options
    if dtype == torch.bfloat16:  # in this case the masters are copies
        for parameter in resumed.parameters():
            parameter.data.zero_()
        second.write_back()
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for m, o in ((model, optimizer), (resumed, second)):
        set_gradients(m, 3)
        o.step()
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_state_of_another_model_is_refused() -> None:
    bf16 = AdamW(small_model(torch.bfloat16).parameters(), lr=1.0)
    fp32 = AdamW(small_model().parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"expected the state of 6 pieces.* got 6"):
        bf16.load_state_dict(fp32.state_dict())


def test_zero_grad_and_missing_gradients() -> None:
    model = small_model(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1.0)
    set_gradients(model, 0)
    optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)


def test_schedule() -> None:
    schedule = Schedule(peak=1.0, final=0.1, warmup_steps=4, total_steps=25)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(4) == 1.0
    assert schedule(14) == pytest.approx(0.55)  # halfway between 4 and 24
    assert schedule(24) == pytest.approx(0.1)
    assert schedule(100) == pytest.approx(0.1)
    falling = [schedule(step) for step in range(4, 25)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shape": "constant"}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"shape": "linear"}, [0.5, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0]),
        ({"shape": "wsd", "decay_steps": 4}, [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"shape": "wsd", "decay_steps": 4, "decay_type": "1-sqrt"},
         [0.5, 1, 1, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]),
        ({"shape": "wsd"}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"shape": "wsd", "decay_steps": 20},
         [0.5, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0]),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_of_schedules(options, expected) -> None:
    schedule = Schedule(peak=1.0, final=0.0, warmup_steps=2, total_steps=10, **options)
    assert [schedule(step) for step in range(10)] == pytest.approx(expected)
    if options != {"shape": "wsd"}:  # without a decay, it falls at once after the last step
        assert schedule(100) == pytest.approx(expected[-1])


def test_the_cosine_is_that_of_earlier_versions_to_the_bit() -> None:
    """Runs of earlier versions resume with the same rates."""
    for peak, final, warmup, total in (
        (1e-3, 1e-4, 20, 200),
        (3e-4, 0.0, 0, 977),
        (0.7, 0.7, 1, 5),
    ):
        schedule = Schedule(peak=peak, final=final, warmup_steps=warmup, total_steps=total)
        for step in range(warmup, total):
            progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
            old = final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))
            assert schedule(step) == old


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (5, 5), (10, 3)])
@pytest.mark.parametrize("shape", SCHEDULES)
def test_schedule_of_few_steps_is_a_number(warmup: int, total: int, shape: str) -> None:
    schedule = Schedule(
        peak=1.0, final=0.1, warmup_steps=warmup, total_steps=total, shape=shape, decay_steps=2
    )
    rates = [schedule(step) for step in range(total)]
    assert all(math.isfinite(rate) and 0 < rate <= 1 for rate in rates)


def test_unknown_shapes_are_refused() -> None:
    for name in ("shape", "decay_type"):
        with pytest.raises(ValueError, match=f"{name} must be one of .*linear.*, got 'step'"):
            Schedule(peak=1.0, final=0.1, warmup_steps=0, total_steps=1, **{name: "step"})
