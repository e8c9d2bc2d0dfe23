"""Sums over all ranks of a pipeline, in which a rank also learns of failures elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.pipeline.failures import Failures, PipelineError
from axonn_ext.ranks.grid import Grid

_MOST_DIFFERENCE = 1e-2  # relative; a rank with other rows differs by more


class Totals:
    """Sums and comparisons over all ranks, along one axis after another. All ranks must make one.

    This way a rank is connected, over gloo, only to the ranks on its own lines of the grid.
    """

    def __init__(self, grid: Grid, failures: Failures) -> None:
        self._grid, self._failures = grid, failures
        lines = [dist.get_process_group_ranks(grid.group(axis)) for axis in grid.coords]
        self._groups = [grid.side_groups.get("totals", line) for line in lines if len(line) > 1]

    def sum(self, number: Tensor, axes: Collection[str], what: str) -> Tensor:
        """Returns the sum over these axes, in fp64, equal on all ranks, on the number's device.

        Ranks that differ along other axes must have the same number; the first rank's counts.
        Raises PipelineError if they clearly do not; differences in rounding may pass.
        """
        others = sorted(axis for axis in self._grid.coords if axis not in axes)
        own = number.detach().double().cpu()
        counts = all(self._grid.coords[axis] == 0 for axis in others)
        counted = own if counts else torch.zeros_like(own)
        total, of_all, size = self._reduce(
            torch.stack([counted, own, own.abs()]), dist.ReduceOp.SUM, what
        )
        copies = self._grid.num_parts(tuple(others))
        if abs(of_all - copies * total) > _MOST_DIFFERENCE * size:
            raise PipelineError(
                f"ranks of {' and '.join(others)} must have the same {what}, but they add up to "
                f"{of_all:g}, where {copies} times those of the first ranks are {copies * total:g}"
            )
        return total.to(number.device)

    def compare(self, numbers: Mapping[str, float | None]) -> None:
        """Raises PipelineError if ranks have different values for a name; None matches any."""
        own = torch.tensor(
            [[n, -n] if n is not None else [-math.inf] * 2 for n in numbers.values()],
            dtype=torch.float64,
        )
        most, least = self._reduce(own.T.contiguous(), dist.ReduceOp.MAX, "numbers")
        for what, number, high, low in zip(
            numbers, numbers.values(), most.tolist(), (0.0 - least).tolist(), strict=True
        ):
            if high != low and high > -math.inf:
                got = "none" if number is None else f"{number:.17g}"
                raise PipelineError(
                    f"all ranks must have the same {what}, got {got}, and from {low:.17g} "
                    f"to {high:.17g}"
                )

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        for group in self._groups:
            work = dist.all_reduce(values, op=op, group=group, async_op=True)
            self._failures.wait_for(work, f"the sum of {what}")
        return values
