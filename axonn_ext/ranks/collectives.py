"""Differentiable collectives along an axis of the grid. On an axis of one rank they cost nothing.

With algorithm "fused" they are NCCL's on GPUs, since there is no matmul to fuse them with.

The gradient of a sum over ranks depends on what the ranks do with the sum, so there are two kinds:

    function       forward      backward     use
    `all_reduce`   all-reduce   all-reduce   the ranks compute different things from the sum
    `reduce_from`  all-reduce   nothing      all ranks compute the same from the sum, so each has
                                             the whole gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (ops registers torch.ops.axonn)
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.spec import settings


def algorithm_of_collective(algorithm: str, input: Tensor) -> str:
    """Returns the algorithm to use for a collective without a matmul.

    On CPUs, "fused" goes through symmetric memory; on GPUs it becomes "sequential", NCCL's.
    """
    return "sequential" if algorithm == "fused" and input.is_cuda else algorithm


def all_gather(shard: Tensor, axis: AxisGroup, *, dim: int = 0, algorithm: str = "auto") -> Tensor:
    """Returns the shards of all ranks of the axis, concatenated along `dim`.

    Backward: reduce-scatter of the gradient.
    """
    check_tensor("all_gather", "shard", shard)
    if axis.size == 1:
        return shard
    algorithm = algorithm_of_collective(algorithm, shard)
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
    algorithm = algorithm_of_collective(algorithm, input)
    return torch.ops.axonn.reduce_scatter(input, dim, axis.name, axis.size, algorithm)


def all_reduce(
    input: Tensor, axis: AxisGroup, *, reduce_op: str = "sum", algorithm: str = "auto"
) -> Tensor:
    """Returns the sum over the axis, accumulated in fp32, or the "max", which has no gradient.

    Backward: all-reduce of the gradient.
    """
    check_tensor("all_reduce", "input", input)
    if axis.size == 1:
        return input
    algorithm = algorithm_of_collective(algorithm, input)
    return torch.ops.axonn.all_reduce(input, reduce_op, axis.name, axis.size, algorithm)


def reduce_from(input: Tensor, axis: AxisGroup, *, algorithm: str = "auto") -> Tensor:
    """Returns the sum over the axis, from which every rank must compute the same.

    Backward: the gradient itself, without communication.
    """
    check_tensor("reduce_from", "input", input)
    if axis.size == 1:
        return input
    refuse_transforms("reduce_from")
    algorithm = algorithm_of_collective(algorithm, input)
    return _ReduceFrom.apply(input, axis.name, axis.size, algorithm)


def copy_to(input: Tensor, axis: AxisGroup, *, algorithm: str = "auto") -> Tensor:
    """Returns the input, equal on all ranks of the axis, for ranks that compute different things.

    Backward: all-reduce of the gradient, accumulated in fp32.
    """
    check_tensor("copy_to", "input", input)
    if axis.size == 1:
        return input
    refuse_transforms("copy_to")
    algorithm = algorithm_of_collective(algorithm, input)
    return _CopyTo.apply(input, axis.name, axis.size, algorithm)


def all_to_all(
    input: Tensor, axis: AxisGroup, *, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    """Returns the rows that the ranks of the axis send to this rank, in the order of the ranks.

        input   [sum(send), ...]     the first send[0] rows are for rank 0, the next for rank 1, ...
        result  [sum(receive), ...]  receive[i] rows come from rank i

    Backward: the reverse exchange of the gradient. Collectives: one all_to_all_single of c10d.

    Unlike the other functions, this is not one of our ops, and c10d does not compare the calls of
    the ranks. On CPUs a rank waits for its peers for at most AXONN_TIMEOUT_SECONDS and then raises
    RuntimeError, also if peers pass other numbers or make another call. On GPUs NCCL's watchdog
    ends the process. Callers that cannot be sure that the ranks agree must compare them first.

    Raises ValueError if `send` does not add up to the rows of input, or if its length is not the
    number of ranks; RuntimeError if a peer dies or does not make the call in time.
    """
    check_tensor("all_to_all", "input", input)
    if len(send) != axis.size or len(receive) != axis.size or sum(send) != len(input):
        raise ValueError(
            f"all_to_all: send and receive must have {axis.size} numbers each, and send must add "
            f"up to input.size(0)={len(input)}, got {list(send)} and {list(receive)}"
        )
    if axis.size == 1:
        return input
    refuse_transforms("all_to_all")
    return _AllToAll.apply(input, axis, list(send), list(receive))


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


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, axis: AxisGroup, send: list[int], receive: list[int]
    ) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return _exchange(input, axis, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchange(dy, ctx.axis, ctx.receive, ctx.send), None, None, None


def _exchange(input: Tensor, axis: AxisGroup, send: list[int], receive: list[int]) -> Tensor:
    output = input.new_empty(sum(receive), *input.shape[1:])
    group = axis.process_group
    try:
        work = dist.all_to_all_single(
            output, input.contiguous(), receive, send, group=group, async_op=True
        )
        if input.is_cpu:
            # c10d's own limit is that of init_process_group, 30 minutes by default.
            work.wait(timedelta(seconds=settings.load().timeout_seconds))
        else:
            work.wait()  # makes the current stream wait, not the host
    except RuntimeError as error:
        raise RuntimeError(
            f"all_to_all along {axis.axis} ({axis.size} ranks, this is number {axis.rank}): a peer "
            f"died, did not come within AXONN_TIMEOUT_SECONDS or passed other sizes: {error}"
        ) from error
    return output
