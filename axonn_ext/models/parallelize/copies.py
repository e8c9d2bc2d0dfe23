"""Notices ranks whose copies of a parameter differ after the first step of an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from axonn_ext.models.parallelize.same import text_of
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.ranks import meeting
from axonn_ext.ranks.grid import Grid


class SameCopies:
    """A forward pre-hook of a split model that warns if ranks train different models.

    It compares in the first call with gradients after step 1, 2, 4, 8, ..., but not in calls that
    torch.compile traces. For each axis it compares the bits of one parameter, the smallest that the
    axis does not split and that is trained. Collectives: none; digests go through the c10d store,
    and the last rank to come warns.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._chosen: list[tuple[str, ShardedParameter]] = []
        self._versions: list[int] = []
        self._changes = 0  # calls before which parameters have changed

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if not self._versions:
            self._chosen = list(self._one_for_each_axis(module))
        versions = [p.parameter._version for _, p in self._chosen]
        before, self._versions = self._versions, versions
        if not before or versions == before:
            return
        self._changes += 1
        if self._changes & (self._changes - 1):
            return
        for axis, p in self._chosen:
            ranks = dist.get_process_group_ranks(self.grid.group(axis))
            text = f"{p.name} {text_of('parallelize', p.name, p.parameter)}"
            if meeting.last_of_ranks_that_differ(text, what="copies", ranks=ranks):
                warnings.warn(
                    f"parallelize: {meeting.name_ranks(ranks)} have different values of {p.name} "
                    "after a step, so they train different models: between backward and "
                    "optimizer.step(), call axonn_ext.sync_gradients(model), and clip by "
                    "axonn_ext.clip_grad_norm_, not by torch's",
                    stacklevel=2,
                )

    def _one_for_each_axis(self, module: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
        every = [p for p in sharded_parameters(module) if p.parameter.requires_grad]
        every.sort(key=lambda p: p.parameter.numel())  # stable: the same order on all ranks
        for axis in ("x", "y", "z", "data"):
            whole = (p for p in every if not any(axis in axes for axes in p.spec.dims.values()))
            if self.grid.size(axis) > 1 and (first := next(whole, None)) is not None:
                yield axis, first
