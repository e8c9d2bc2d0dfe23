"""Gradients of the ops. Each is made of the same ops, so backward overlaps what forward does.

A tensor that an op leaves whole on every rank (`all_reduce`, `matmul_all_reduce`) has, by
convention, a gradient of one of two kinds, and each op fixes which: `matmul_all_reduce` hands its
result to ranks that all do the same with it, so its gradient is whole on every rank and nothing is
summed; `all_reduce` hands its result to ranks that each do something of their own, so their
gradients are summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.axonn


def _save_group(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Every schema that is differentiated here ends with (..., group_name, group_size,
    algorithm)."""
    ctx.group = inputs[-3:]


def _setup_collective(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_group(ctx, inputs)
    ctx.argument = inputs[1]


def _setup_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, *dim = inputs[:-3]
    _save_group(ctx, inputs)
    ctx.save_for_backward(a, b)
    ctx.dim = dim[0] if dim else None


def _all_gather_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _ops.reduce_scatter(dy, ctx.argument, *ctx.group), None, None, None, None


def _reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _ops.all_gather(dy, ctx.argument, *ctx.group), None, None, None, None


def _all_reduce_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.argument != "sum":
        raise NotImplementedError(f"all_reduce: reduce_op={ctx.argument!r} has no gradient")
    return _ops.all_reduce(dy, "sum", *ctx.group), None, None, None, None


def _all_gather_matmul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a_shard, b = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _ops.matmul_reduce_scatter(dy, b.t(), ctx.dim, *ctx.group)
    if ctx.needs_input_grad[1]:
        db = _ops.all_gather_matmul(a_shard.t(), dy, 1 - ctx.dim, *ctx.group)
    return da, db, None, None, None, None


def _matmul_all_gather_rhs_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b_shard = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _ops.matmul_all_gather_rhs(dy, b_shard.t(), 1 - ctx.dim, *ctx.group)
    if ctx.needs_input_grad[1]:
        db = _ops.matmul_reduce_scatter(a.t(), dy, ctx.dim, *ctx.group)
    return da, db, None, None, None, None


def _matmul_reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _ops.all_gather_matmul(dy, b.t(), ctx.dim, *ctx.group)
    if ctx.needs_input_grad[1]:
        db = _ops.matmul_all_gather_rhs(a.t(), dy, ctx.dim, *ctx.group)
    return da, db, None, None, None, None


def _matmul_all_reduce_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    da = dy @ b.t() if ctx.needs_input_grad[0] else None
    db = a.t() @ dy if ctx.needs_input_grad[1] else None
    return da, db, None, None, None


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _bias, names, sizes, sharded, gather_dim, scatter_dim, *saves, algorithm = inputs
    _y, full_x, full_weight = output
    save_input, save_weight = saves
    ctx.mark_non_differentiable(full_x, full_weight)
    ctx.set_materialize_grads(False)
    # Where nothing was gathered, what came in is whole already.
    gathers = sharded and sizes[0] > 1
    ctx.x_is_full = not gathers or save_input
    ctx.weight_is_full = sizes[2] == 1 or save_weight
    ctx.save_for_backward(
        full_x if gathers and save_input else x,
        full_weight if sizes[2] > 1 and save_weight else weight,
    )
    ctx.arguments = (names, sizes, sharded, gather_dim, scatter_dim, algorithm)


def _linear_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 11
    x, weight = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    grads = _ops.linear_backward(
        dy, x, weight, ctx.x_is_full, ctx.weight_is_full, mask, *ctx.arguments
    )
    return (*(grad if on else None for grad, on in zip(grads, mask, strict=True)), *(None,) * 8)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _no_second_backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "linear_backward: a Linear of the 3D matmul can be differentiated once only; leave "
        "create_graph=False"
    )


for _name, _backward, _setup in (
    ("all_gather", _all_gather_backward, _setup_collective),
    ("reduce_scatter", _reduce_scatter_backward, _setup_collective),
    ("all_reduce", _all_reduce_backward, _setup_collective),
    ("all_gather_matmul", _all_gather_matmul_backward, _setup_matmul),
    ("matmul_all_gather_rhs", _matmul_all_gather_rhs_backward, _setup_matmul),
    ("matmul_reduce_scatter", _matmul_reduce_scatter_backward, _setup_matmul),
    ("matmul_all_reduce", _matmul_all_reduce_backward, _setup_matmul),
    ("linear_forward", _linear_backward, _setup_linear),
    ("linear_backward", _no_second_backward, _setup_nothing),
):
    torch.library.register_autograd(f"axonn::{_name}", _backward, setup_context=_setup)
