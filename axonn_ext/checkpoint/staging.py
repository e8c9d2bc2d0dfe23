"""Copies, in host memory, the part of a checkpoint that a rank writes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from axonn_ext._version import __version__
from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.layout import Layout
from axonn_ext.checkpoint.manifest import DTYPES, StoredTensor, block_key, dtype_name
from axonn_ext.checkpoint.shards import Shard, with_turns
from axonn_ext.checkpoint.state import (
    Optimizer,
    model_shards,
    optimizer_options,
    optimizer_shards,
    place_in_world,
    random_shards,
    stage_of,
)
from axonn_ext.checkpoint.values import decode, encode

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint.

    blocks   those that this rank writes, in host memory, by `block_key`
    tensors  all tensors of this rank's pipeline stage, equal on its ranks
    stage    how the stage's ranks hold the tensors that each has in full
    """

    blocks: Mapping[str, Tensor]
    tensors: Mapping[str, StoredTensor]
    stage: Layout
    facts: Mapping[str, Any]
    extra: Mapping[str, Any]
    options: tuple[Mapping[str, Any], ...]


class Staging:
    """Host memory for a snapshot, reused for the next one.

    Fresh memory would cost more than the copy, since the system clears each page.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
        facts: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Copies this rank's blocks. This invalidates the result of the last call.

        Raises CheckpointError for values of unsupported types, with the keys that lead to them.
        """
        shards = model_shards(model, optimizer) | random_shards()
        if optimizer is not None:
            shards |= optimizer_shards(model, optimizer)
        layouts, rank = _layouts(shards), place_in_world()[0]
        copies = {
            key: self._copy(key, tensor)
            for name, shard in shards.items()
            for key, tensor in _written_blocks(name, shard, layouts[name], rank)
        }
        self._memory = {key: self._memory[key] for key in copies}
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU are done
        tensors = {
            name: StoredTensor(dtype_name(shard.dtype), layouts[name])
            for name, shard in shards.items()
        }
        about = {"axonn_ext": __version__, "torch": torch.__version__, "written": time.time()}
        options = _copied(list(optimizer_options(optimizer)), "optimizer.param_groups")
        return Snapshot(
            copies, tensors, stage_of(model), about | dict(facts or {}), _extra(extra),
            tuple(options),
        )  # fmt: skip

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        memory = self._memory.get(key)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            pin = tensor.is_cuda
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._memory[key] = memory
        return memory.copy_(tensor, non_blocking=True)


def _layouts(shards: Mapping[str, Shard]) -> dict[str, Layout]:
    """Returns the layouts, with turns. Raises CheckpointError for unsupported dtypes."""
    for name, shard in shards.items():
        if dtype_name(shard.dtype) not in DTYPES:
            raise CheckpointError(
                f"{name}: expected a dtype of {', '.join(DTYPES)}, got {dtype_name(shard.dtype)}"
            )
    return with_turns(shards)


def _written_blocks(
    name: str, shard: Shard, layout: Layout, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields the blocks that this rank writes, with their keys."""
    held = layout.held(rank)
    filled = {offsets: tuple(t.shape) for offsets, t in shard.blocks.items() if t.numel()}
    assert layout.where.keys() & {"data"} or dict(held) == filled, (name, layout, filled)
    if layout.owner(rank) == rank:
        yield from ((block_key(name, o), shard.blocks[o].detach()) for o, _ in held)


def _extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None):
        raise CheckpointError(f"extra: expected a mapping, got a {type(extra).__name__}")
    return _copied(dict(extra or {}), "extra")


def _copied(value: T, path: str) -> T:
    """Returns the value as it will be read back. Raises CheckpointError."""
    try:
        read: T = decode(encode(value, path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return read
