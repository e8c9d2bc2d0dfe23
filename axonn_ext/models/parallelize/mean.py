"""The mean over the rows of all ranks, for losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid


def global_mean(
    total: Tensor,
    count: Tensor | float,
    grid: Grid,
    *,
    axes: Sequence[str],
) -> Tensor:
    """Returns the mean over the rows of all ranks, equal on every rank.

    total   the sum of the losses of this rank's rows, one number with a gradient
    count   the number of these rows (or labelled tokens)
    axes    the axes over which ranks have different rows: ("x", "y", "z", "data") for a model of
            `auto_parallelize`, ("z", "data") for one of `parallelize`. With the wrong axes the
            value is right but the gradients are not, so there is no default

    The gradient is this rank's share, so that after `sync_gradients` the gradients are those of the
    mean. Ranks may have different numbers of rows, or none. Sums and counts are added up in fp64,
    and the mean has the dtype of total. Collectives: an all-reduce of two numbers over each axis,
    none in backward.

    Raises TypeError or ValueError if total or count is not one number, or for an unknown axis.
    """
    check_tensor("global_mean", "total", total)
    if total.numel() != 1:
        raise ValueError(f"global_mean: total must be one number, got shape {list(total.shape)}")
    # Neither fp16 nor bf16 can represent the number of rows of a large batch.
    rows = torch.as_tensor(count).to(dtype=torch.float64, device=total.device)
    if rows.numel() != 1:
        raise ValueError(f"global_mean: count must be one number, got shape {list(rows.shape)}")
    both = torch.stack([total.flatten()[0].double(), rows.flatten()[0]])
    for axis in axes:
        both = collectives.reduce_from(both, grid.axis(axis))
    return (both[0] / both[1].detach()).to(total.dtype)
