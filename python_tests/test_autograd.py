"""What autograd, autocast and bad arguments make of the ops, beyond their values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import GridShape, nn, ops
from axonn_ext.ops import ALGORITHMS
from grids import grid_of

axonn = torch.ops.axonn


def under_autocast() -> list[tuple[str, torch.dtype, bool]]:
    """(algorithm, dtype of the result, whether gradients equal those without autocast)."""
    group = dist.group.WORLD
    answers = []
    for algorithm in ALGORITHMS:
        gradients = []
        for enabled in (True, False):
            a = torch.ones(4, 6, requires_grad=True)
            b = torch.full((6, 4), 0.3, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                y = ops.matmul_reduce_scatter(a, b, group, algorithm=algorithm)
            y.sum().backward()
            gradients.append((a.grad, b.grad))
        same = all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))
        answers.append((algorithm, y.dtype, same))
    return answers


def test_autocast_changes_nothing(pool) -> None:
    for answers in pool(2).run(under_autocast):
        assert answers == [(algorithm, torch.float32, True) for algorithm in ALGORITHMS]


def saved_elements(linear: nn.Linear, x: Tensor) -> int:
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(x).sum().backward()
    return sum(sizes)


def frozen_and_trained() -> tuple[int, int]:
    linear = nn.Linear(8, 4, grid=grid_of(GridShape(x=2)), role="expand", bias=False)
    x = torch.ones(16, 8, requires_grad=True)
    trained = saved_elements(linear, x)
    linear.weight.requires_grad_(False)
    return saved_elements(linear, x), trained


def test_a_frozen_weight_keeps_no_activation(pool) -> None:
    for frozen, trained in pool(2).run(frozen_and_trained):
        assert trained - frozen == 16 * 8


def test_a_tangent_is_refused_not_dropped() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(RuntimeError, match="jvp"):
            axonn.matmul_reduce_scatter(dual, b, 0, "none", 1, "fused")


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> None:
    groups = (["r", "s", "z"], [1, 1, 1], True, 0, 0, "auto")
    axonn.linear_backward(dy, x, weight, True, True, [True, True, False], *groups)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    groups = (["r", "s", "z"], [1, 1, 1], True, 0, 0, False, False, "auto")
    axonn.linear_forward(x, weight, bias, *groups)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: linear_backward(torch.ones(4, 6), torch.ones(3, 4), torch.ones(6, 4)),
            ValueError,
            "linear_backward: rows of x=3 must equal rows of dy=4",
        ),
        (
            lambda: linear_backward(torch.ones(4, 5), torch.ones(4, 4), torch.ones(6, 4)),
            ValueError,
            "linear_backward: features of dy=5 must equal rows of the weight=6",
        ),
        (
            lambda: linear_forward(torch.ones(4, 5), torch.ones(6, 5), torch.ones(12)),
            ValueError,
            r"linear_forward: bias must have shape \[6\], got \[12\]",
        ),
        (
            lambda: linear_forward(torch.ones(4, 5), torch.ones(6, 5), torch.ones(6).double()),
            TypeError,
            "linear_forward: bias has dtype Double but x has Float",
        ),
        (
            lambda: axonn.all_reduce(torch.ones(4), "sum", "none", 0, "auto"),
            ValueError,
            "all_reduce: group_size must be at least 1, got 0",
        ),
        (
            lambda: axonn.matmul_all_reduce(
                torch.ones(2, 2).half(), torch.ones(2, 2).half(), "none", 1, "auto"
            ),
            TypeError,
            "matmul_all_reduce: a has dtype Half, expected float32, float64 or bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
