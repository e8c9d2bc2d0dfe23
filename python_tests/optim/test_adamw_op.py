"""The op for updates in host memory gives the same bits as torch's fused AdamW for CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axonn_ext.kernels import extension  # noqa: F401  (registers the op)
from limits import HANG_SECONDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Near the sizes of vectors and cache lines in torch's kernel, and of tasks in ours.
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 1000, 16384, 40007)
KINDS = ("normal", "wide", "special")
BETAS = ((0.9, 0.95), (0.9, 0.999), (0.3, 0.5), (0.5, 0.9), (0.0, 0.0))
NUM_STEPS = 3


@dataclass
class State:
    """Tensors of one parameter; master, exp_avg and exp_avg_sq in fp32 (fp64 for fp64)."""

    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor
    step: Tensor

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in vars(self).values()))


def draw(generator: torch.Generator, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Returns normal numbers, numbers of all magnitudes, or those and zeros, infinities, NaN."""
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind != "normal":
        exponents = torch.empty(numel, dtype=torch.float64).uniform_(-104, 88, generator=generator)
        values *= exponents.exp()
    if kind == "special":
        for place, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0, -0.0)):
            values[place::37] = value
    return values.to(dtype)


def states(dtype: torch.dtype, kind: str, seed: int) -> list[State]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    return [
        State(
            draw(generator, numel, dtype, kind), draw(generator, numel, wide, kind),
            draw(generator, numel, wide, kind), draw(generator, numel, wide, kind).abs(),
            torch.full((numel,), 7.0).to(dtype), torch.tensor(float(index % 3)),
        )
        for index, numel in enumerate(SIZES)
    ]  # fmt: skip


def of_torch(each: list[State], numbers: dict[str, float], factor: float) -> None:
    for s in each:
        s.step += 1
    wide = [s.gradient.to(s.master.dtype) for s in each]
    torch._fused_adamw_(
        [s.master for s in each], [g if factor == 1 else g * factor for g in wide],
        [s.exp_avg for s in each], [s.exp_avg_sq for s in each], [], [s.step for s in each],
        amsgrad=False, maximize=False, **numbers,
    )  # fmt: skip
    for s in each:
        s.weight.copy_(s.master)


def ours(each: list[State], numbers: dict[str, float], factor: float) -> None:
    for s in each:
        s.step += 1
    torch.ops.axonn._adamw_(
        [s.gradient for s in each], [s.master for s in each], [s.exp_avg for s in each],
        [s.exp_avg_sq for s in each], [s.weight for s in each], [s.step for s in each],
        gradient_factor=factor, **numbers,
    )  # fmt: skip


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal, or both are NaN; the bits of a NaN depend on the processor."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    equal = one.view(whole) == other.view(whole)
    return bool((equal | (one.isnan() & other.isnan())).all())


def cases() -> Iterator[tuple[float, tuple[float, float], float]]:
    """Yields a weight decay, betas and a factor for the gradients."""
    for betas in BETAS:
        yield 0.1, betas, 1.0
        yield 0.0, betas, 0.37


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_torch(threads: None, dtype: torch.dtype, kind: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for seed, (decay, betas, factor) in enumerate(cases()):
        expected = states(dtype, kind, seed)
        got = [s.clone() for s in expected]
        for step in range(NUM_STEPS):
            numbers = {
                "lr": 1e-3 * (1 + step), "beta1": betas[0], "beta2": betas[1], "eps": 1e-8,
                "weight_decay": decay,
            }  # fmt: skip
            of_torch(expected, numbers, factor)
            ours(got, numbers, factor)
        for one, other in zip(got, expected, strict=True):
            for name, tensor in vars(one).items():
                assert same_bits(tensor, getattr(other, name)), (name, tensor.numel(), betas)


@pytest.mark.long
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_of_the_kernels_for_other_processors(capability: str) -> None:
    """Torch also has a kernel without fused multiply-add, which the environment can select."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
         "test_bits_of_torch", __file__],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        timeout=HANG_SECONDS, env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{2 * len(DTYPES) * len(KINDS)} passed" in run.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_update_is_that_of_the_paper(dtype: torch.dtype) -> None:
    """Compares the second step with the formulas in float64."""
    (state,) = (s for s in states(dtype, "normal", 0) if s.master.numel() == 1000)
    lr, (beta1, beta2), eps, decay, factor = 1e-2, (0.9, 0.95), 1e-8, 0.1, 0.37
    state.step.fill_(1.0)
    g, p, m, v = (
        t.double() for t in (state.gradient, state.master, state.exp_avg, state.exp_avg_sq)
    )
    m = beta1 * m + (1 - beta1) * g * factor
    v = beta2 * v + (1 - beta2) * (g * factor) ** 2
    root = (v / (1 - beta2**2)).sqrt()
    p = p * (1 - lr * decay) - lr * m / (1 - beta1**2) / (root + eps)
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    ours([state], numbers, factor)
    # About ten roundings, each of at most half a unit in the last place of terms below these.
    for got, expected, terms in (
        (state.exp_avg, m, g.abs() + m.abs()), (state.exp_avg_sq, v, v),
        (state.master, p, p.abs() + lr * (g.abs() + m.abs()) / root),
    ):  # fmt: skip
        assert ((got.double() - expected).abs() <= 10 * 2**-24 * (terms + 1e-30)).all()
    assert torch.equal(state.weight, state.master.to(dtype))


def test_weights_that_begin_inside_a_cache_line() -> None:
    """With many elements, weights are written past the caches, in whole lines where possible."""
    numel = (1 << 20) + 77
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(numel, generator=generator).bfloat16()
    plain = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for offset in (0, 1, 16):
        memory = torch.full((numel + offset + 9,), 7.0, dtype=torch.bfloat16)
        state = State(
            gradient, torch.randn(numel, generator=generator), torch.zeros(numel),
            torch.zeros(numel), memory[offset : offset + numel], torch.tensor(0.0),
        )  # fmt: skip
        expected = state.clone()
        ours([state], plain, 1.0)
        of_torch([expected], plain, 1.0)
        assert same_bits(state.master, expected.master)
        assert same_bits(state.weight, expected.weight)
        assert (memory[:offset] == 7).all() and (memory[offset + numel :] == 7).all()


def test_refusals() -> None:
    numbers = {"lr": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    wrong = (
        ("master", torch.zeros(8, dtype=torch.bfloat16), TypeError,
         "master must be of Float for gradients of BFloat16, got BFloat16"),
        ("exp_avg", torch.zeros(8, dtype=torch.float64), TypeError, "exp_avg must be of Float"),
        ("weight", torch.zeros(8), TypeError, "weight must be of BFloat16"),
        ("exp_avg_sq", torch.zeros(7), ValueError, "exp_avg_sq has 7 elements, but its gradient"),
        ("master", torch.zeros(8, 2)[:, 0], ValueError, r"master must be contiguous .* \[2\]"),
        ("gradient", torch.zeros(8, dtype=torch.int64), TypeError, "gradients must be of float32"),
        ("step", torch.zeros(()).double(), ValueError, "a step must be one number of float32"),
    )  # fmt: skip
    good = State(
        torch.ones(8).bfloat16(), torch.ones(8), torch.zeros(8), torch.zeros(8),
        torch.ones(8).bfloat16(), torch.zeros(()),
    )  # fmt: skip
    for name, tensor, error, said in wrong:
        state = State(**(vars(good.clone()) | {name: tensor}))
        with pytest.raises(error, match=f"_adamw_: .*{said}"):
            ours([good, state], numbers, 1.0)
    assert torch.equal(good.master, torch.ones(8))  # nothing is updated
    lists = [[good.gradient], [good.master], [], [good.exp_avg_sq], [good.weight], [good.step]]
    with pytest.raises(ValueError, match="one length, got 1 gradients, 1 masters, 0 exp_avgs"):
        torch.ops.axonn._adamw_(*lists, gradient_factor=1.0, **numbers)
