"""Reads the manifest of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.layout import MOST_RANKS, file_name
from axonn_ext.checkpoint.manifest import (
    EXTENT_BYTES,
    FORMAT,
    MALFORMED,
    MANIFEST,
    MOST_BYTES,
    Manifest,
    read_framed,
    tensor_of,
)
from axonn_ext.checkpoint.values import decode
from axonn_ext.spec.files.errors import InputError


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint's folder.

    Raises CheckpointError if there is none, or if it is damaged.
    """
    path = folder / MANIFEST
    try:
        body = read_framed(path, "checkpoint", MOST_BYTES)
    except InputError as error:
        raise CheckpointError(f"{folder} is not a usable checkpoint: {error}") from None
    try:
        if body["format"] != FORMAT or body["extent_bytes"] != EXTENT_BYTES:
            raise CheckpointError(
                f"{path}: expected format {FORMAT} with extents of {EXTENT_BYTES} bytes, got "
                f"format {body['format']!r}: another version of axonn_ext wrote it"
            )
        found = _manifest_of(body)
        objects = (found.facts, found.extra, *found.optimizer_options)
        if not all(isinstance(each, dict) for each in objects):
            raise ValueError("facts, extra and optimizer_options must be objects")
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is no manifest of a checkpoint: {type(error).__name__}: {error}"
        ) from None
    return found


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    count, num_bytes = body["num_files"], body["num_bytes"]
    if not all(type(n) is int for n in (count, num_bytes)) or not 0 < count <= MOST_RANKS:
        raise ValueError(f"expected 1 to {MOST_RANKS} files, got {count}")
    tensors = {name: tensor_of(name, value, count) for name, value in body["tensors"].items()}
    return Manifest(
        tensors, _Files(count), num_bytes, body["facts"], decode(body["extra"]),
        tuple(decode(body["optimizer_options"])), str(body["token"]),
    )  # fmt: skip


class _Files(Sequence[str]):
    """The file names of `count` ranks, made on demand."""

    def __init__(self, count: int) -> None:
        self._ranks = range(count)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, number: Any) -> Any:
        return file_name(self._ranks[number])
