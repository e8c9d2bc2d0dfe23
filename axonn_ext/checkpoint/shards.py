"""Blocks of whole tensors, described by their global position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's blocks of a whole tensor: one, several, or none.

    torch.distributed.checkpoint plans with the methods whose names have underscores: who writes
    which block, and which blocks of a checkpoint a rank has to read for its own.
    """

    shape: tuple[int, ...]  # of the whole tensor
    blocks: Mapping[Offsets, Tensor]  # by their offsets in the whole tensor
    dtype: torch.dtype

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """A tensor that every rank has whole."""
        return cls(tuple(tensor.shape), {(0,) * tensor.dim(): tensor}, tensor.dtype)

    @property
    def tensor(self) -> Tensor:
        """The only block."""
        (tensor,) = self.blocks.values()
        return tensor

    def with_tensors(self, changed: Callable[[Offsets, Tensor], Tensor]) -> Shard:
        """The same blocks, with other memory."""
        blocks = {offsets: changed(offsets, t) for offsets, t in self.blocks.items()}
        return Shard(self.shape, blocks, self.dtype)

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            for offsets, tensor in self.blocks.items()
        ]

    def __create_write_items__(self, name: str, shard: Shard) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


def blocks_of_run(
    shape: Sequence[int], start: int, flat: Tensor
) -> Iterator[tuple[Offsets, Tensor]]:
    """Yields a run of a tensor's elements, in row-major order, as blocks with their offsets.

    These are views of `flat`, which has the elements from `start` on: a part of a row, whole rows,
    and a part of another row, where a row of several dimensions is divided alike.
    """
    stop = start + flat.numel()
    if not shape or stop <= start:
        if flat.numel():
            yield (), flat.view(())
        return
    inner = math.prod(shape[1:])
    if len(shape) == 1:
        yield (start,), flat
        return
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # inside one row
        first = last = start // inner
        yield from _in_row(shape, first, start - first * inner, flat)
        return
    head = first * inner - start
    if head:
        yield from _in_row(shape, first - 1, inner - head, flat[:head])
    if first < last:
        rows = flat[head : head + (last - first) * inner]
        yield (first, *(0,) * (len(shape) - 1)), rows.view(last - first, *shape[1:])
    if stop > last * inner:
        yield from _in_row(shape, last, 0, flat[last * inner - start :])


def _in_row(
    shape: Sequence[int], row: int, start: int, flat: Tensor
) -> Iterator[tuple[Offsets, Tensor]]:
    for offsets, block in blocks_of_run(shape[1:], start, flat):
        yield (row, *offsets), block[None]
