"""Differentiable collectives along an axis of the grid. On an axis of one rank they cost nothing.

The gradient of a sum over ranks depends on what the ranks do with the sum, so there are two kinds:

    function       forward      backward     use
    `all_reduce`   all-reduce   all-reduce   the ranks compute different things from the sum
    `reduce_from`  all-reduce   nothing      all ranks compute the same from the sum, so each of
                                             them has the whole gradient
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.grid import AxisGroup
from axonn_ext.ops._arguments import check_tensor


def all_gather(shard: Tensor, axis: AxisGroup, *, dim: int = 0, algorithm: str = "auto") -> Tensor:
    """Returns the shards of all ranks of the axis, concatenated along `dim`.

    Backward: reduce-scatter of the gradient.
    """
    check_tensor("all_gather", "shard", shard)
    if axis.size == 1:
        return shard
    return torch.ops.axonn.all_gather(shard, dim, axis.name, axis.size, algorithm)


def reduce_scatter(
    input: Tensor, axis: AxisGroup, *, dim: int = 0, algorithm: str = "auto"
) -> Tensor:
    """Returns this rank's block (of `dim`) of the sum over the axis, accumulated in fp32.

    Backward: all-gather of the gradient.
    """
    check_tensor("reduce_scatter", "input", input)
    if axis.size == 1:
        return input
    return torch.ops.axonn.reduce_scatter(input, dim, axis.name, axis.size, algorithm)


def all_reduce(
    input: Tensor, axis: AxisGroup, *, reduce_op: str = "sum", algorithm: str = "auto"
) -> Tensor:
    """Returns the sum over the axis, accumulated in fp32; or the "max", which has no gradient.

    Backward: all-reduce of the gradient.
    """
    check_tensor("all_reduce", "input", input)
    if axis.size == 1:
        return input
    return torch.ops.axonn.all_reduce(input, reduce_op, axis.name, axis.size, algorithm)


def reduce_from(input: Tensor, axis: AxisGroup, *, algorithm: str = "auto") -> Tensor:
    """Returns the sum over the axis, from which every rank must compute the same.

    Backward: the gradient itself, without communication.
    """
    check_tensor("reduce_from", "input", input)
    if axis.size == 1:
        return input
    refuse_transforms("reduce_from")
    return _ReduceFrom.apply(input, axis.name, axis.size, algorithm)


def copy_to(input: Tensor, axis: AxisGroup, *, algorithm: str = "auto") -> Tensor:
    """Returns the input, which is equal on all ranks of the axis, for ranks that go on differently.

    Backward: all-reduce of the gradient, accumulated in fp32.
    """
    check_tensor("copy_to", "input", input)
    if axis.size == 1:
        return input
    refuse_transforms("copy_to")
    return _CopyTo.apply(input, axis.name, axis.size, algorithm)


def refuse_transforms(what: str) -> None:
    """Raises NotImplementedError under a transform of torch.func.

    The autograd.Function of `what` does not support these transforms.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{what}: torch.func's transforms (grad, vjp, vmap, jvp, ...) are not supported; "
            "supported are backward(), torch.autograd.grad and torch.func.functional_call"
        )


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, name: str, size: int, algorithm: str) -> Tensor:
        return torch.ops.axonn.all_reduce(input, "sum", name, size, algorithm)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dy, None, None, None


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, name: str, size: int, algorithm: str) -> Tensor:
        ctx.axis = (name, size, algorithm)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return torch.ops.axonn.all_reduce(dy, "sum", *ctx.axis), None, None, None
