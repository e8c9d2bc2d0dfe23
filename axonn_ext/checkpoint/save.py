"""Writes a checkpoint under a temporary name, and renames it once it is complete on disk."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import remove, sync_folder, write_text
from axonn_ext.checkpoint.folder import replaced_path
from axonn_ext.checkpoint.layout import file_name
from axonn_ext.checkpoint.manifest import MANIFEST, Manifest, StoredFile, read_index
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.checkpoint.staging import Snapshot, Staging
from axonn_ext.checkpoint.state import Optimizer
from axonn_ext.checkpoint.storage import write_file
from axonn_ext.checkpoint.tables import agreed_tables

_SHARED = "the folder must be in a file system that all hosts share"


def save(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint, on all ranks together, and returns when it is on disk.

    The folder must not exist, and all hosts must share the file system. Whatever happens, there is
    either a whole checkpoint of that name or none. Each block is written by one of the ranks that
    have it. Parameters that the optimizer (axonn_ext.optim.AdamW) updates in fp32 are written in
    fp32. extra: values of the types in `checkpoint.values`, for example the state_dict of a
    schedule or of a GradScaler, and the position in the data; tensors come back on the CPU.

    Collectives: none; ranks agree through the store. Raises CheckpointError, on every rank, if one
    of them cannot write its part, if their tensors differ, or if a value in `extra` or in the
    optimizer's options has an unsupported type; the message has the keys that lead to it.
    """
    ranks = Ranks.of_world()
    snapshot = ranks.agreed(lambda: Staging().take(model=model, optimizer=optimizer, extra=extra))
    write(Path(folder), snapshot, ranks)


def write(folder: Path, snapshot: Snapshot, ranks: Ranks, *, replaces: bool = False) -> int:
    """Writes a snapshot of all ranks to a folder; see `save`. Returns the bytes of all files.

    replaces: the folder may exist, and is moved away once the new one is complete.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    tables = agreed_tables(snapshot.tensors, snapshot.stage, ranks)
    try:
        token = ranks.told(lambda: _begin(folder, partial, ranks, replaces=replaces))

        def write_own() -> StoredFile:
            if not partial.is_dir():
                raise CheckpointError(f"{partial} is not here, where rank 0 has made it: {_SHARED}")
            own = file_name(ranks.rank)
            return write_file(partial, own, snapshot.blocks, token, beat=ranks.beat)

        stored = ranks.agreed(write_own)
        ranks.agreed(lambda: _check_seen(partial, token, ranks))
        num_bytes = int(ranks.reduced(stored.num_bytes, operator.add))

        def finish() -> None:
            manifest = Manifest(
                tables, [file_name(rank) for rank in range(ranks.size)], num_bytes,
                snapshot.facts, snapshot.extra, snapshot.options, token,
            )  # fmt: skip
            write_text(partial / MANIFEST, manifest.to_json())
            replaced = replaced_path(folder)
            if folder.exists():
                remove(replaced, beat=ranks.beat)
                folder.rename(replaced)
            partial.rename(folder)
            sync_folder(folder.parent)
            remove(replaced, beat=ranks.beat)

        ranks.told(finish)
    except BaseException:
        if ranks.rank == 0:
            remove(partial, beat=ranks.beat)
        raise
    return num_bytes


def _begin(folder: Path, partial: Path, ranks: Ranks, *, replaces: bool) -> str:
    """Makes the folder, on rank 0, before any rank writes; returns the checkpoint's token."""
    if not replaces and (folder.exists() or folder.is_symlink()):
        raise CheckpointError(f"{folder}: expected a new folder, got one that exists")
    try:
        remove(partial, beat=ranks.beat)  # left half written by an earlier job
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {partial}: {error.strerror or error}") from None
    return os.urandom(8).hex()


def _check_seen(partial: Path, token: str, ranks: Ranks) -> None:
    """Raises CheckpointError unless this rank sees the files of the ranks that report to it."""
    for rank in ranks.children:
        name = file_name(rank)
        try:
            seen = (partial / name).stat().st_size == read_index(partial, name, token).num_bytes
        except (OSError, CheckpointError):
            seen = False
        if not seen:
            raise CheckpointError(
                f"{partial / name} is not here as rank {rank} has written it: {_SHARED}"
            )
