"""Blocks of whole tensors, described by their global position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Shard:
    """This rank's block of a whole tensor.

    torch.distributed.checkpoint plans with the methods whose names have underscores: who writes
    which block, and which blocks of a checkpoint a rank has to read for its own.
    """

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the block in the whole tensor
    tensor: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """A tensor that every rank has whole."""
        return cls(tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    def with_tensor(self, tensor: Tensor) -> Shard:
        """The same block, with other memory."""
        return Shard(self.shape, self.offsets, tensor)

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)]

    def __create_write_items__(self, name: str, shard: Shard) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties(dtype=self.tensor.dtype),
            size=self.size(),
        )
        index = MetadataIndex(name, self.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]
