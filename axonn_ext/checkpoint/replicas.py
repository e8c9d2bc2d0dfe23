"""Blocks that several ranks hold: one rank reads each, and sends copies to the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from axonn_ext.checkpoint.layout import grid_of
from axonn_ext.checkpoint.shards import Shard, with_turns
from axonn_ext.checkpoint.state import place_in_world
from axonn_ext.nn.sharded import declaration_of
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import device_type

_PART_BYTES = 64 << 20  # staged at a time, if the group does not serve the block's device


class Replicas:
    """The blocks of a model, of which this rank reads its `own` for all ranks that hold them.

    layouts: those of the shards, with the turns in which ranks that hold the same blocks read them
    """

    def __init__(self, model: nn.Module, shards: Mapping[str, Shard]) -> None:
        grids = [found.grid for module in model.modules() if (found := declaration_of(module))]
        self._grids = {grid_of(grid.shape): grid for grid in grids}
        self._shards, self.layouts = shards, with_turns(shards)
        self._rank, _ = place_in_world()
        owners = {name: layout.owner(self._rank) for name, layout in self.layouts.items()}
        self.own = {name: s for name, s in shards.items() if owners[name] == self._rank}

    @torch.no_grad()
    def spread(self) -> None:
        """Copies each block from the rank that has read it to all others that hold it.

        Collectives: broadcasts in the groups of the model's grid; without a grid, in the world
        group.
        """
        for name in sorted(self._shards):  # in one order on all ranks
            shard, layout = self._shards[name], self.layouts[name]
            blocks = shard.blocks or {(): torch.empty((), dtype=shard.dtype)}
            for axis, source in layout.path(self._rank):
                group = _group(self._grids.get(layout.grid), axis)
                for offsets in sorted(blocks):
                    _broadcast(blocks[offsets], group, source)


def _group(grid: Grid | None, axis: str) -> ProcessGroup | None:
    """Returns the group of ranks on an axis with the same blocks; without a grid, the world."""
    if grid is None:
        return dist.group.WORLD
    return grid.ends.process_group if axis == "pipe" else grid.group(axis)


def _broadcast(tensor: Tensor, group: ProcessGroup | None, source: int) -> None:
    whole = tensor.detach().contiguous()
    for part in whole.view(-1).view(torch.uint8).split(_PART_BYTES):
        kind = device_type(group)
        sent = part if part.device.type == kind else part.to(kind)
        dist.broadcast(sent, group=group, group_src=source)
        if sent is not part:
            part.copy_(sent)
    if not tensor.is_contiguous():
        tensor.copy_(whole)
