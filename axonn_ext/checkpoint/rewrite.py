"""Reads a checkpoint's whole tensors in one process and writes them to a new set of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import remove, sync_folder, write_tensors, write_text
from axonn_ext.checkpoint.layout import Layout, file_name
from axonn_ext.checkpoint.manifest import DTYPES, MANIFEST, Manifest, StoredTensor, block_key
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.shards import Shard
from axonn_ext.checkpoint.storage import Reading, write_index


def reshard(folder: Path, out: Path, *, num_files: int) -> Manifest:
    """Rewrites a checkpoint in `num_files` files of about the same size; returns its manifest.

    Any grid can read any checkpoint, so this only serves the file system: fewer files, or more. At
    most one file's tensors are in memory. Raises CheckpointError for a damaged checkpoint, or if
    `out` already exists or cannot be written.
    """
    manifest = read_manifest(folder)
    if out.exists():
        raise CheckpointError(f"{out}: expected a new folder, got one that exists")
    manifest.check_last_file(folder)
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
    tensors: dict[str, StoredTensor] = {}
    token, num_bytes, shares = os.urandom(8).hex(), 0, list(_shares(manifest, num_files))
    for number, names in enumerate(shares):
        reading, layouts = Reading(folder, manifest), dict[str, Layout]()
        for name in names:
            shape = manifest.tensors[name].shape
            grid = (len(shares), 1, 1, 1, 1)
            layouts[name] = Layout(grid, shape, ((),) * len(shape), turn=number)
            tensors[name] = StoredTensor(manifest.tensors[name].dtype, layouts[name])
            reading.add(name, (0,) * len(shape), shape)
        reading.check()  # so that no more memory is allocated than the files have bytes
        shards = {
            name: Shard.whole(torch.empty(layout.shape, dtype=DTYPES[tensors[name].dtype]), layout)
            for name, layout in layouts.items()
        }
        reading.read(shards)
        file = file_name(number)
        stored = write_tensors(partial / file, {name: s.tensor for name, s in shards.items()})
        starts = {  # in the file, whole tensors have their plain names
            block_key(name, (0,) * len(layouts[name].shape)): start
            for name, start in stored.starts.items()
        }
        write_index(partial, file, replace(stored, starts=starts), token)
        num_bytes += stored.num_bytes
    files = [file_name(number) for number in range(len(shares))]
    return Manifest(
        tensors, files, num_bytes, manifest.facts, manifest.extra, manifest.optimizer_options, token
    )


def _shares(manifest: Manifest, num_files: int) -> Iterator[list[str]]:
    """Yields the names of the tensors of each file."""
    sizes = {name: tensor.num_bytes(tensor.shape) for name, tensor in manifest.tensors.items()}
    share, filled, names = sum(sizes.values()) / num_files, 0, list[str]()
    written = 1
    for name, size in sizes.items():
        names.append(name)
        filled += size
        if filled >= share * written:
            yield names
            names, written = [], written + 1
    if names:
        yield names
