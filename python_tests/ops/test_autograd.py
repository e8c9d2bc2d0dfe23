"""What autograd, autocast and bad arguments make of the ops, beyond their values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import GridShape, models, nn, ops, sync_gradients
from axonn_ext.overlap import Orchestrator
from axonn_ext.ranks import collectives
from axonn_ext.spec.parallel import ALGORITHMS
from grids import grid_of, relative_error
from model_cases import CONFIGS, random_batch

axonn = torch.ops.axonn


def under_autocast(op_name: str, dtype: torch.dtype) -> list[tuple[str, list[bool]]]:
    """By algorithm: whether result and gradients are those of operands that are cast by hand."""
    answers = []
    for algorithm in ALGORITHMS:
        results = []
        for enabled in (True, False):
            generator = torch.Generator().manual_seed(1)
            a, b = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                operands = (a, b) if enabled else (a.to(dtype), b.to(dtype))
                y = getattr(ops, op_name)(*operands, dist.group.WORLD, algorithm=algorithm)
            y.float().square().sum().backward()
            results.append((y, a.grad, b.grad))
        dtypes = [t.dtype for t in results[0]] == [dtype, torch.float32, torch.float32]
        same = [torch.equal(x, y) for x, y in zip(*results, strict=True)]
        answers.append((algorithm, [dtypes, *same]))
    return answers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [name for name in ops.__all__ if name != "ALGORITHMS"])
def test_autocast_casts_the_operands_as_it_does_those_of_matmuls(pool, op, dtype) -> None:
    for answers in pool(2).run(under_autocast, op, dtype):
        assert answers == [(algorithm, [True] * 4) for algorithm in ALGORITHMS]


def autocast_of(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return axonn.matmul_all_reduce(a, b, "none", 1, "fused", True)


def test_autocast_leaves_what_torch_leaves() -> None:
    wide = torch.ones(2, 2, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert autocast_of(wide, wide, dtype).dtype == torch.float64


def trained_under_autocast(family: str) -> tuple[float, float, bool]:
    """Relative errors of a model's loss and gradients under autocast against those without, and
    whether those with the orchestrator have the same bits."""
    grid = grid_of(GridShape(x=2, z=2))
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    losses, gradients = [], []
    for enabled, overlap in ((False, False), (True, False), (True, True)):
        model = models.build(CONFIGS[family], grid, seed=1)
        with Orchestrator(model) if overlap else nullcontext() as orchestrator:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model.loss(ids, labels)
            loss.backward()
            orchestrator.sync_gradients() if orchestrator else sync_gradients(model)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    exact, plain, overlapped = gradients
    close = relative_error(overlapped, plain) < 1e-2
    return relative_error(losses[1], losses[0]), relative_error(plain, exact), close


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_train_under_autocast(pool, family: str) -> None:
    for loss_error, gradient_error, close in pool(4).run(trained_under_autocast, family):
        assert 0 < loss_error < 1e-2  # some roundings of 2^-9
        assert 0 < gradient_error < 5e-2
        assert close


# --- torch.func -----------------------------------------------------------------------------------


def transformed() -> dict[str, str]:
    """What each transform makes of an op, a Linear and a model: "right", "wrong", or the error."""
    grid, group = grid_of(GridShape(x=2)), dist.group.WORLD
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4, 4, generator=generator) for _ in range(2))
    batch = torch.randn(3, 4, 4, generator=generator)
    linear = nn.Linear(4, 4, grid=grid, role="expand")
    model = models.build(CONFIGS["llama"], grid, seed=1)
    ids, labels = random_batch()

    def product(x: Tensor) -> Tensor:
        return ops.matmul_all_reduce(x, b, group)

    def one_loss(parameters: dict[str, Tensor]) -> Tensor:
        rows = torch.func.functional_call(model, parameters, (ids,))
        return model.criterion(rows, labels.flatten())

    def loss_and_gradient(doubled: bool) -> tuple[Tensor, Tensor]:
        own = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        if doubled:
            loss = one_loss(own)
        else:
            loss = model.loss(ids, labels)
            own = dict(model.named_parameters())
        return loss, torch.cat([g.flatten() for g in torch.autograd.grad(loss, own.values())])

    parameters = {n: p.detach() for n, p in model.named_parameters()}
    tangent = torch.ones_like(a)
    calls = {
        "grad": lambda: torch.func.grad(lambda x: product(x).sum())(a),
        "vjp": lambda: torch.func.vjp(product, a)[1](tangent),
        "jvp": lambda: torch.func.jvp(product, (a,), (tangent,)),
        "hessian": lambda: torch.func.hessian(lambda x: product(x).sum())(a),
        "linear": lambda: torch.func.grad(lambda x: linear(x).sum())(a),
        "norm": lambda: torch.func.vmap(nn.RMSNorm(4, grid=grid))(batch),
        "model": lambda: torch.func.grad(one_loss)(parameters),
        "collective": lambda: torch.func.grad(
            lambda x: collectives.all_gather(x, grid.axis("x")).sum()
        )(a),
        "vmap": lambda: torch.func.vmap(product)(batch),
        "functional_call": lambda: loss_and_gradient(doubled=True),
    }
    expected = {
        "vmap": lambda: torch.stack([product(x) for x in batch]),
        "functional_call": lambda: loss_and_gradient(doubled=False),
    }
    answers = {}
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap's, of its loop
                got, want = call(), expected[name]()
            answers[name] = "right" if _equal(got, want) else "wrong"
        except RuntimeError as error:
            answers[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return answers


def _equal(got: object, want: object) -> bool:
    pairs = zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_transforms_work_or_are_refused_by_name(pool) -> None:
    for answers in pool(2).run(transformed):
        for name in ("vmap", "functional_call"):
            assert answers.pop(name) == "right", name
        forward = "forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad) is not"
        assert answers.pop("jvp").startswith(f"NotImplementedError: matmul_all_reduce: {forward}")
        assert answers.pop("hessian").startswith("NotImplementedError: matmul_all_reduce: ")
        for name, what in {
            "grad": "matmul_all_reduce",
            "vjp": "matmul_all_reduce",
            "linear": "linear_forward",
            "norm": "RMSNorm",
            "model": "reduce_scatter",
            "collective": "all_gather",
        }.items():
            start = f"NotImplementedError: {what}: torch.func's transforms"
            assert answers[name].startswith(start) and "are not supported" in answers[name]


def call_of_another_weight() -> str:
    grid = grid_of(GridShape(z=2))
    linear = nn.Linear(4, 4, grid=grid, role="expand")
    others = {n: p.detach().clone() for n, p in linear.named_parameters()}
    with Orchestrator(linear):
        try:
            torch.func.functional_call(linear, others, (torch.ones(4, 4),))
        except ValueError as error:
            return str(error)
    return "no error"


def test_an_orchestrator_names_weights_that_are_not_its_own(pool) -> None:
    for message in pool(2).run(call_of_another_weight):
        assert message.startswith("Orchestrator: a module came with another weight than its own")


def saved_elements(call: Callable[[], Tensor]) -> int:
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call().sum().backward()
    return sum(sizes)


def frozen_and_trained() -> tuple[int, int]:
    linear = nn.Linear(8, 4, grid=grid_of(GridShape(x=2)), role="expand", bias=False)
    x = torch.ones(16, 8, requires_grad=True)
    trained = saved_elements(lambda: linear(x))
    linear.weight.requires_grad_(False)
    return saved_elements(lambda: linear(x)), trained


def test_a_frozen_weight_keeps_no_activation(pool) -> None:
    for frozen, trained in pool(2).run(frozen_and_trained):
        assert trained - frozen == 16 * 8


def saved_by_products() -> list[int]:
    """With an `a` of 2 x 4 and a `b` of 4 x 6, of which one needs a gradient."""
    axis = grid_of(GridShape(x=2)).axis("x")
    group, found = (axis.name, axis.size), []
    for trained in range(2):
        a, b = torch.ones(2, 4), torch.ones(4, 6)
        (a, b)[trained].requires_grad_()
        found += [
            saved_elements(lambda: axonn.all_gather_matmul(a, b, 0, *group, "auto")),  # noqa: B023
            saved_elements(lambda: axonn.matmul_reduce_scatter(a, b, 0, *group, "auto")),  # noqa: B023
        ]
    return found


def test_a_product_keeps_what_the_other_operand_needs(pool) -> None:
    for found in pool(2).run(saved_by_products):
        assert found == [4 * 6, 4 * 6, 2 * 4, 2 * 4]


def test_a_tangent_is_refused_not_dropped() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(RuntimeError, match="jvp"):
            axonn.matmul_reduce_scatter(dual, b, 0, "none", 1, "fused")


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> None:
    groups = (["r", "s", "z"], [1, 1, 1], True, 0, 0, "auto", True)
    axonn.linear_backward(dy, x, weight, True, True, [True, True, False], *groups)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    groups = (["r", "s", "z"], [1, 1, 1], True, 0, 0, False, False, "auto", True)
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
                torch.ones(2, 2).int(), torch.ones(2, 2).int(), "none", 1, "auto", True
            ),
            TypeError,
            "matmul_all_reduce: a has dtype Int, expected float32, float64, bfloat16 or float16",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
