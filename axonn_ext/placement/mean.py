"""The mean over the rows of all ranks, for losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axonn_ext import collectives
from axonn_ext.grid import Grid
from axonn_ext.ops._arguments import check_tensor


def global_mean(
    total: Tensor,
    count: Tensor | float,
    grid: Grid,
    *,
    axes: Sequence[str] = ("x", "y", "z", "data"),
) -> Tensor:
    """Returns the mean over the rows of all ranks, equal on every rank.

    total   the sum of the losses of this rank's rows, one number with a gradient
    count   how many rows (or labelled tokens) they are
    axes    those over which the ranks have different rows: all for a model of `auto_parallelize`,
            ("z", "data") for one of `parallelize`

    The gradient is this rank's share, so that after `sync_gradients` the gradients are those of the
    mean. Ranks may have different numbers of rows, or none. Collectives: an all-reduce of two
    numbers over each axis, none in backward.

    Raises TypeError or ValueError if total is not one number, or for an unknown axis.
    """
    check_tensor("global_mean", "total", total)
    if total.numel() != 1:
        raise ValueError(f"global_mean: total must be one number, got shape {list(total.shape)}")
    both = torch.stack([total.flatten()[0], torch.as_tensor(count).to(total).flatten()[0]])
    for axis in axes:
        both = collectives.reduce_from(both, grid.axis(axis))
    return both[0] / both[1].detach()
