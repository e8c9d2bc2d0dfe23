"""Reads and writes the files of a checkpoint: safetensors, with checksums of their extents."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.layout import MOST, Block
from axonn_ext.checkpoint.manifest import (
    EXTENT_BYTES,
    Manifest,
    StoredFile,
    block_key,
    dtype_name,
    index_name,
)
from axonn_ext.spec.files.errors import first_of
from axonn_ext.spec.files.files import open_new

_PART_BYTES = 256 << 20  # the most bytes per write; also about the distance of two fsyncs


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *,
    beat: Callable[[], None] = lambda: None,
) -> StoredFile:  # fmt: skip
    """Writes contiguous CPU tensors to a safetensors file and syncs it to disk.

    The checksums are computed from the file as read back. beat: called now and then. Raises
    OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # In this order each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends = list(itertools.accumulate((tensors[name].nbytes for name in names), initial=0))
    for name, begin, end in zip(names, ends, ends[1:], strict=False):
        tensor = tensors[name]
        header[name] = {
            "dtype": _code(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open_new(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            waiting = 0
            for part in _parts(tensors[name] for name in names):
                file.write(part)
                waiting += len(part)
                if waiting >= _PART_BYTES:  # starts the disk early, and keeps each call short
                    file.flush()
                    os.fsync(file.fileno())
                    waiting = 0
                beat()
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    starts = {name: 8 + len(text) + begin for name, begin in zip(names, ends, strict=False)}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return StoredFile(len(data), tuple(_checksums(data, beat)), starts)


def _code(dtype: torch.dtype) -> str:
    """Returns the safetensors name of a dtype."""
    name = dtype_name(dtype)
    codes = {"bfloat16": "BF16", "bool": "BOOL"}
    return codes.get(name) or f"{name[0].upper()}{8 * dtype.itemsize}"


def _parts(tensors: Iterable[Tensor]) -> Iterator[bytearray | memoryview]:
    """Yields the bytes of the tensors, small ones together, in parts of at most _PART_BYTES."""
    small = bytearray()
    for tensor in tensors:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        if len(small) + len(content) <= _PART_BYTES // 16:
            small += content
            continue
        if small:
            yield small
            small = bytearray()
        for start in range(0, len(content), _PART_BYTES):
            yield content[start : start + _PART_BYTES]
    yield small


def _checksums(data: mmap.mmap, beat: Callable[[], None]) -> Iterator[int]:
    with memoryview(data) as view:
        for start in range(0, len(data), EXTENT_BYTES):
            yield zlib.crc32(view[start : start + EXTENT_BYTES])
            beat()


def write_text(path: Path, text: str) -> None:
    """Writes a file next to `path`, syncs it to disk, then renames it. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_new(partial) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None


def remove(folder: Path, *, beat: Callable[[], None] = lambda: None) -> None:
    """Removes a folder and its contents, as far as possible; for a link, only the link.

    beat: called for each file.
    """
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        with suppress(OSError):
            for path in folder.iterdir():
                with suppress(OSError):
                    path.unlink()
                beat()
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MappedFile:
    """A file of a checkpoint, mapped into memory. An extent is checked on its first read.

    Only the pages that are read come into memory, and they belong to the page cache, not to the
    process. Raises CheckpointError if the file is missing or has the wrong size.

    wanted: the names of the tensors to be read, for messages.
    """

    def __init__(
        self, folder: Path, name: str, manifest: Manifest, wanted: Sequence[str] = ()
    ) -> None:
        self._path = folder / name
        try:
            self._stored = manifest.index(folder, name)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the file has {_some(wanted)}") from None
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != self._stored.num_bytes:
                    raise CheckpointError(
                        f"{self._path}: expected {self._stored.num_bytes} bytes, got {size}; it "
                        f"has {_some(wanted)}"
                    )
                # Nothing is written, but torch warns about read-only memory.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be read: {error.strerror}; it has {_some(wanted)}"
            ) from None
        self._checked: set[int] = set()

    def missing(self, blocks: Iterable[tuple[str, Block]], manifest: Manifest) -> list[str]:
        """Returns the names of the tensors some of whose blocks the file lacks."""
        missing = []
        for name, block in blocks:
            start = self._stored.starts.get(block_key(name, block.offsets), MOST)
            num_bytes = manifest.tensors[name].num_bytes(block.sizes)
            if start + num_bytes > self._stored.num_bytes:
                missing.append(name)
        return missing

    def rows(self, name: str, dtype: torch.dtype, block: Block, rows: tuple[int, int]) -> Tensor:
        """Returns rows [first, end) of a block in the file; the result shares the file's memory.

        Raises CheckpointError if an extent that contains them is damaged; it names the tensors in
        that extent.
        """
        sizes = [rows[1] - rows[0], *block.sizes[1:]] if block.sizes else []
        row_bytes = math.prod(block.sizes[1:]) * dtype.itemsize
        start = self._stored.starts[block_key(name, block.offsets)] + rows[0] * row_bytes
        end = start + math.prod(sizes) * dtype.itemsize
        for extent in range(start // EXTENT_BYTES, -(-end // EXTENT_BYTES)):
            if self._is_damaged(extent):
                raise CheckpointError(self._problem(extent))
        count = math.prod(sizes)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=start).view(sizes)

    def _is_damaged(self, extent: int) -> bool:
        if extent in self._checked:
            return False
        start = extent * EXTENT_BYTES
        with memoryview(self._data) as view:
            found = zlib.crc32(view[start : start + EXTENT_BYTES])
        if found != self._stored.checksums[extent]:
            return True
        self._checked.add(extent)
        return False

    def problems(self, beat: Callable[[], None]) -> Iterator[str]:
        """Reads the whole file; yields a message for each damaged extent."""
        for extent in range(len(self._stored.checksums)):
            beat()
            if self._is_damaged(extent):
                yield self._problem(extent)

    def _problem(self, extent: int) -> str:
        start = extent * EXTENT_BYTES
        end = min(start + EXTENT_BYTES, len(self._data))
        ordered = sorted((at, key.rpartition("@")[0]) for key, at in self._stored.starts.items())
        ends = [at for at, _ in ordered[1:]] + [len(self._data)]
        names = [
            name
            for (at, name), stop in zip(ordered, ends, strict=True)
            if at < end and stop > start
        ]
        return (
            f"{self._path} is damaged: bytes {start} to {end}, of "
            f"{_some([*dict.fromkeys(names)])}, do not match their checksum"
        )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "the names of the tensors"
    return f"{'tensors' if len(names) > 1 else 'tensor'} {first_of(names)}"


def find_problems(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[str]:  # fmt: skip
    """Reads the files of a checkpoint completely; yields a message for each problem.

    names: the files to read; default all. beat: called for each extent.
    """
    try:
        manifest.check_last_file(folder)
    except CheckpointError as error:
        yield str(error)
        return
    for name in manifest.files if names is None else names:
        beat()
        blocks = [
            (tensor, block)
            for tensor, stored in manifest.tensors.items()
            for block in stored.layout.blocks_of(name)
        ]
        try:
            file = MappedFile(folder, name, manifest, [tensor for tensor, _ in blocks])
            if missing := file.missing(blocks, manifest):
                yield f"{folder / index_name(name)}: has no whole block of {_some(missing)}"
            yield from file.problems(beat)
        except CheckpointError as error:
            yield str(error)
