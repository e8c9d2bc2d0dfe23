"""fp16 models with a loss scale against the same weights in float64: loss, norm, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from axonn_ext import (
    GridShape,
    full_gradients,
    full_state_dict,
    gradient_norm,
    models,
    sync_gradients,
)
from axonn_ext.models import ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.nn import Linear
from grids import grid_of
from model_cases import CONFIGS, MAX_NORM, random_batch

# Gradients here are about 1e-3; fp16 has full precision down to 2**-14 = 6e-5.
SCALE = 2.0**10
# A gradient goes through about 30 roundings of 2**-11, not the same ones as in plain PyTorch.
ROUND_OFF = 30**0.5 * 2**-11
# ReLU's gradient jumps at 0. If normal numbers are rounded by r, a fraction 0.8 r may change sign.
# Each of these changes its part of the squared gradient, to which half of all numbers contribute.
JUMPS = {"opt": (1.6 * ROUND_OFF) ** 0.5}
DIFFERENT = ("gpt2", "qwen3-wide")  # the others are like one of these
State = dict[str, torch.Tensor]


def plain_results(name: str, state: State, dtype: torch.dtype) -> State:
    """Loss, norm and clipped gradients of plain PyTorch; float64 except for the model itself."""
    model = PlainTransformer(CONFIGS[name]).to(dtype)
    model.load_state_dict(state)
    loss = model.loss(*random_batch())
    scale = SCALE if dtype == torch.float16 else 1.0
    loss.backward(torch.full_like(loss, scale))
    gradients = {p: p.grad.double() for p in model.parameters()}
    norm = torch.nn.utils.get_total_norm(gradients.values()) / scale
    factor = min(1.0, MAX_NORM / (norm.item() + 1e-6)) / scale
    named = model.named_parameters(remove_duplicate=False)
    return {"loss": loss.detach(), "norm": norm, **{n: gradients[p] * factor for n, p in named}}


def errors_of(got: State, want: State) -> dict[str, float]:
    """Relative errors; the keys' bias has no gradient except rounding (see test_models.py)."""
    scale = {n: want[n.replace("k_proj.bias", "q_proj.bias")] for n in want}
    return {n: ((got[n].double() - want[n]).norm() / scale[n].norm()).item() for n in want}


def grid_errors(name: str, shape: GridShape, parallel: ParallelConfig) -> list[str]:
    """Results whose error against float64 is more than twice that of plain PyTorch in fp16."""
    grid = grid_of(shape)
    model = models.build(CONFIGS[name], grid, parallel, seed=2, dtype=torch.float16)
    state = full_state_dict(model)
    want = plain_results(name, state, torch.float64)
    plain = errors_of(plain_results(name, state, torch.float16), want)
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    loss = model.loss(ids, labels)
    assert loss.dtype == torch.float32
    loss.backward(torch.full_like(loss, SCALE))
    sync_gradients(model)
    norm, factor = gradient_norm(model, MAX_NORM, loss_scale=SCALE)
    gradients = {n: g.double() * factor for n, g in full_gradients(model).items()}
    assert all(p.grad.dtype == torch.float16 for p in model.parameters())
    found = errors_of({"loss": loss.detach(), "norm": norm, **gradients}, want)
    return [
        f"{shape.short()} {n}: {e:.1e}, plain {plain[n]:.1e}"
        for n, e in found.items()
        if not e < 2 * plain[n] + ROUND_OFF + JUMPS.get(name, 0.0)
    ]


@pytest.mark.parametrize("parallel", ["sharded", "replicated"])
@pytest.mark.parametrize(
    "name",
    [n if n in DIFFERENT else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS],
)
def test_is_near_float64(pool, name, parallel) -> None:
    options = ParallelConfig(layout=parallel)
    for shape in (GridShape(2, 2), GridShape(2, 1, 2), GridShape(1, 2, 1, 2)):
        for found in pool(4).run(grid_errors, name, shape, options):
            assert not found, "\n".join(found)


def test_in_one_process(pool) -> None:
    [found] = pool(1).run(grid_errors, "llama", GridShape(), ParallelConfig())
    assert not found, "\n".join(found)


def norm_and_factor(max_norm: float, scale: float, overflow_on: int) -> tuple[float, float, bool]:
    """For gradients of 1, 2 and 3 times the scale, one of which may be infinite on one rank."""
    grid = grid_of(GridShape(x=2, data=2))
    model = nn.ModuleDict(
        {n: Linear(8, 8, role="expand", grid=grid, bias=False, dtype=torch.float16) for n in "abc"}
    )
    for index, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, (index + 1) * scale)
    if grid.rank == overflow_on:
        model["b"].weight.grad[0, 0] = math.inf
        model["c"].weight.grad[0, 0] = math.nan
    # Each gradient is the sum over two data ranks.
    sync_gradients(model)
    before = [p.grad.clone() for p in model.parameters()]
    norm, factor = gradient_norm(model, max_norm, loss_scale=scale)
    untouched = all(
        torch.equal(g, p.grad) or bool(g.isnan().any())
        for g, p in zip(before, model.parameters(), strict=True)
    )
    return norm.item(), factor.item(), untouched


def test_norm_and_factor_have_no_scale(pool) -> None:
    want = math.sqrt(64 * (2**2 + 4**2 + 6**2))
    for scale in (1.0, 4096.0):
        for norm, factor, untouched in pool(4).run(norm_and_factor, 1.0, scale, -1):
            assert norm == pytest.approx(want, rel=1e-6)
            assert factor == pytest.approx(1 / (want + 1e-6) / scale, rel=1e-6)
            assert untouched
        for norm, factor, _ in pool(4).run(norm_and_factor, math.inf, scale, -1):
            assert (norm, factor) == (pytest.approx(want, rel=1e-6), 1 / scale)


@pytest.mark.parametrize("rank", [0, 3])
def test_an_overflow_on_one_rank_is_seen_on_all(pool, rank) -> None:
    for norm, _, untouched in pool(4).run(norm_and_factor, 1.0, 16.0, rank):
        assert not math.isfinite(norm)
        assert untouched


def refusal(max_norm: float, scale: float) -> str:
    linear = Linear(8, 8, role="expand", grid=grid_of(GridShape()))
    with pytest.raises(ValueError) as error:
        gradient_norm(linear, max_norm, loss_scale=scale)
    return str(error.value)


@pytest.mark.parametrize(
    ("max_norm", "scale", "message"),
    [
        (0.0, 1.0, "gradient_norm: max_norm must be positive, got 0.0"),
        (1.0, 0.0, "gradient_norm: loss_scale must be positive and finite, got 0.0"),
        (1.0, math.inf, "gradient_norm: loss_scale must be positive and finite, got inf"),
        (1.0, math.nan, "gradient_norm: loss_scale must be positive and finite, got nan"),
    ],
)
def test_nonsense_is_refused(pool, max_norm, scale, message) -> None:
    assert pool(1).run(refusal, max_norm, scale) == [message]
