"""Reads a checkpoint's whole tensors in one process, and writes them in other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import MappedFile, remove, sync_folder, write_tensors, write_text
from axonn_ext.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    Block,
    Manifest,
    StoredFile,
    StoredTensor,
    read_manifest,
)


class WholeTensors:
    """The whole tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._files: dict[str, MappedFile] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor in memory of its own. Raises CheckpointError if it is damaged."""
        stored = self._manifest.tensors[name]
        # First, so that no more memory is taken than the files have bytes.
        for file in {block.file for block in stored.blocks} - self._files.keys():
            self._files[file] = MappedFile(self._folder, file, self._manifest)
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for block in stored.blocks:
            rows = block.sizes[0] if block.sizes else 1
            part = whole
            for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            part.copy_(self._files[block.file].block(name, block, (0, rows)))
        return whole


def reshard(folder: Path, out: Path, *, num_files: int) -> Manifest:
    """Writes a checkpoint anew, in a number of files of about the same size; returns its manifest.

    Any grid can read any checkpoint, so this is for the file system: fewer files, or more. At most
    one file's tensors are in memory. Raises CheckpointError for a damaged checkpoint, a folder that
    is there already, or one that cannot be written.
    """
    manifest = read_manifest(folder)
    if out.exists():
        raise CheckpointError(f"{out}: expected a new folder, but there is one")
    partial = out.with_name(f".{out.name}.partial")
    try:
        remove(partial)
        partial.mkdir(parents=True)
        new = _write_files(folder, partial, manifest, num_files)
        write_text(partial / MANIFEST, new.to_json())
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from None
    finally:
        remove(partial)
    return new


def _write_files(folder: Path, partial: Path, manifest: Manifest, num_files: int) -> Manifest:
    whole = WholeTensors(folder, manifest)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for number, names in enumerate(_shares(manifest, num_files)):
        file_name = f"rank-{number:05d}.safetensors"
        file, starts = write_tensors(partial / file_name, {name: whole[name] for name in names})
        files[file_name] = file
        for name in names:
            old = manifest.tensors[name]
            block = Block((0,) * len(old.shape), old.shape, file_name, starts[name])
            tensors[name] = StoredTensor(old.dtype, old.shape, (block,))
    return Manifest(tensors, files, manifest.facts, manifest.extra, manifest.optimizer_options)


def _shares(manifest: Manifest, num_files: int) -> Iterator[list[str]]:
    """Yields the names of the tensors of each file."""
    sizes = {
        name: sum(tensor.num_bytes(block) for block in tensor.blocks)
        for name, tensor in manifest.tensors.items()
    }
    share, filled, names = sum(sizes.values()) / num_files, 0, []
    written = 1
    for name, size in sizes.items():
        names.append(name)
        filled += size
        if filled >= share * written:
            yield names
            names, written = [], written + 1
    if names:
        yield names
