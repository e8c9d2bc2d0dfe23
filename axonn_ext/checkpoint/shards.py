"""This rank's blocks of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.checkpoint.layout import Layout, in_turn
from axonn_ext.checkpoint.runs import Offsets


@dataclass(frozen=True)
class Shard:
    """This rank's blocks of a whole tensor: one, several, or none.

    layout: which blocks all ranks have. blocks: by their offsets in the whole tensor.
    """

    layout: Layout
    blocks: Mapping[Offsets, Tensor]
    dtype: torch.dtype

    @classmethod
    def whole(cls, tensor: Tensor, layout: Layout) -> Shard:
        """A tensor that this rank has in full."""
        return cls(layout, {(0,) * tensor.dim(): tensor}, tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.layout.shape

    @property
    def tensor(self) -> Tensor:
        """The only block."""
        (tensor,) = self.blocks.values()
        return tensor


def with_turns(shards: Mapping[str, Shard]) -> dict[str, Layout]:
    """Returns the layouts, with turns for the ranks that hold the same blocks."""
    return in_turn(
        {name: shard.layout for name, shard in shards.items()},
        {name: shard.dtype.itemsize for name, shard in shards.items()},
    )
