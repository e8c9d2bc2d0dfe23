"""Moves activations between the three ways in which ranks can hold their features.

In layout `replicated` every rank has all rows of its (data, z) group, and of their features

    "y"      its block over y, equal on all ranks of x: the residual stream
    "x"      its block over x, equal on all ranks of y: between an expand and a contract Linear
    "whole"  all of them, equal on all ranks of x and y

Ranks that hold the same features compute the same results, so each has their whole gradient. Hence
the gradient of a gathered tensor is this rank's block of the gradient, without a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axonn_ext.ranks.grid import AxisGroup, Grid

LAYOUTS = ("y", "x", "whole")


def convert(tensor: Tensor, grid: Grid, have: str, want: str) -> Tensor:
    """Returns the tensor [..., features of `have`] in another layout, [..., features of `want`].

    Collectives: from a block, an all-gather of the features over its axis; from "whole", none in
    forward, and in backward an all-gather over the axis of the new block.

    Raises ValueError if the axis does not divide the features of a whole tensor.
    """
    if have == want:
        return tensor
    if have != "whole" and grid.size(have) > 1:
        tensor = _GatherFeatures.apply(tensor, grid.axis(have))
    if want != "whole" and grid.size(want) > 1:
        axis = grid.axis(want)
        if tensor.shape[-1] % axis.size:
            raise ValueError(
                f"a tensor with {tensor.shape[-1]} features must be split over {want}, and "
                f"{want}={axis.size} does not divide them"
            )
        tensor = _OwnFeatures.apply(tensor, axis)
    return tensor


def own_block(whole: Tensor, axis: AxisGroup, dim: int = -1) -> Tensor:
    """Returns this rank's block of a dim, without a copy."""
    size = whole.shape[dim] // axis.size
    return whole.narrow(dim, axis.rank * size, size)


def _gather(block: Tensor, axis: AxisGroup) -> Tensor:
    # The op gathers dims 0 and 1 of matrices.
    rows = block.reshape(-1, block.shape[-1])
    whole: Tensor = torch.ops.axonn.all_gather(rows, 1, axis.name, axis.size, "auto")
    return whole.view(*block.shape[:-1], whole.shape[-1])


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return _gather(block, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return own_block(dy, ctx.axis).contiguous(), None


class _OwnFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return own_block(whole, axis).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _gather(dy, ctx.axis), None
