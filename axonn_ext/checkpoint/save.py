"""Writes a checkpoint: beside its place, complete and on the disk before it gets its name."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from axonn_ext._version import __version__
from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import remove, sync_folder, write_text
from axonn_ext.checkpoint.manifest import MANIFEST, Manifest
from axonn_ext.checkpoint.ranks import Ranks, all_ranks
from axonn_ext.checkpoint.shards import Offsets, Shard
from axonn_ext.checkpoint.state import (
    Optimizer,
    model_shards,
    optimizer_options,
    optimizer_shards,
    random_shards,
)
from axonn_ext.checkpoint.storage import FolderWriter, ShardSavePlanner
from axonn_ext.checkpoint.values import decode, encode

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will have of this rank: blocks in host memory, and copies of values."""

    shards: Mapping[str, Shard]
    facts: Mapping[str, Any]
    extra: Mapping[str, Any]
    options: tuple[Mapping[str, Any], ...]


class Staging:
    """Host memory for a snapshot, which is used again for the next one.

    Fresh memory would cost more than the copy, since the system clears each page of it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, Offsets], Tensor] = {}

    def take(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
        facts: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> Snapshot:
        """Copies the state of this rank. What the last call returned is no longer valid then.

        Raises CheckpointError for values that a checkpoint cannot have, with their place.
        """
        shards = model_shards(model, optimizer) | random_shards(rank)
        if optimizer is not None:
            shards |= optimizer_shards(model, optimizer)
        copies = {
            name: shard.with_tensors(partial(self._copy, name)) for name, shard in shards.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU are done
        about = {"axonn_ext": __version__, "torch": torch.__version__, "written": time.time()}
        options = _copied(list(optimizer_options(optimizer)), "optimizer.param_groups")
        return Snapshot(copies, about | dict(facts or {}), _extra(extra), tuple(options))

    def _copy(self, name: str, offsets: Offsets, tensor: Tensor) -> Tensor:
        memory = self._memory.get((name, offsets))
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            pin = tensor.is_cuda
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._memory[name, offsets] = memory
        return memory.copy_(tensor, non_blocking=True)


def _extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None):
        raise CheckpointError(f"extra: expected a mapping, got a {type(extra).__name__}")
    return _copied(dict(extra or {}), "extra")


def _copied(value: T, path: str) -> T:
    """Returns the value as it will be read again. Raises CheckpointError."""
    try:
        read: T = decode(encode(value, path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return read


def save(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint, on all ranks together, and returns when it is on the disk.

    The folder must not exist, and all hosts must share the file system. Whatever happens, there is
    either a whole checkpoint of that name or none. Each block is written by one of the ranks that
    have it. Parameters that the optimizer (axonn_ext.optim.AdamW) updates in fp32 are written in
    fp32. extra: values of the types in `checkpoint.values`, for example the state_dict of a
    schedule or of a GradScaler, and the position in the data; tensors come back on the CPU.

    Collectives: gathers of plans and results, in a gloo group of its own. Raises CheckpointError,
    on every rank, if one of them cannot write its part, or if a value of `extra` or of the
    optimizer's options cannot be kept; the message has the keys that lead to it.
    """
    with all_ranks() as ranks:
        snapshots: list[Snapshot] = []
        ranks.agreed(
            lambda: snapshots.append(
                Staging().take(model=model, optimizer=optimizer, extra=extra, rank=ranks.rank)
            )
        )
        write(Path(folder), snapshots[0], ranks)


def write(folder: Path, snapshot: Snapshot, ranks: Ranks, *, replaces: bool = False) -> int:
    """Writes a snapshot of all ranks to a folder; see `save`. Returns its bytes, on rank 0.

    replaces: the folder may exist. Then it is moved away when the new one is complete.
    """
    if not replaces:
        ranks.agreed(lambda: _check_free(folder), on_rank=0)
    partial = folder.with_name(f".{folder.name}.partial")
    writer = FolderWriter(partial, ranks.rank)
    try:
        with planning(folder, ranks):
            dcp.save(
                dict(snapshot.shards), storage_writer=writer, planner=ShardSavePlanner(),
                process_group=ranks.group, no_dist=ranks.group is None,
            )  # fmt: skip
        ranks.agree(writer.error)
        ranks.agreed(lambda: _finish(folder, partial, snapshot, writer), on_rank=0)
    except BaseException:
        if ranks.rank == 0:
            remove(partial)
        raise
    return sum(file.num_bytes for file in writer.files.values())


def _check_free(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder}: expected a new folder, but there is one")


def _finish(folder: Path, partial: Path, snapshot: Snapshot, writer: FolderWriter) -> None:
    """Completes the checkpoint on rank 0, and gives it its name, which another one may have."""
    for name, file in writer.files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(
                f"rank 0 does not see {path} as another rank has written it: the folder must be in "
                "a file system that all hosts share"
            )
    manifest = Manifest(
        writer.tensors, writer.files, snapshot.facts, snapshot.extra, snapshot.options
    )
    write_text(partial / MANIFEST, manifest.to_json())
    replaced = folder.with_name(f".{folder.name}.replaced.partial")
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync_folder(folder.parent)
    remove(replaced)


@contextmanager
def planning(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Must enclose calls of torch.distributed.checkpoint, whose errors become CheckpointError."""
    try:
        if ranks.group is not None:
            yield
        else:
            with warnings.catch_warnings():  # of no other rank taking part, which we know
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder}: rank {rank}: {failure}") from None
