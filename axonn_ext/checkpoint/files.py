"""Reads and writes the files of a checkpoint: safetensors, with checksums of their extents."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.manifest import DTYPES, EXTENT_BYTES, Block, Manifest, StoredFile
from axonn_ext.inputs.errors import first_of
from axonn_ext.inputs.files import open_new


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[StoredFile, dict[str, int]]:
    """Writes contiguous CPU tensors to a safetensors file, and has them on the disk at the end.

    Returns the file's size and checksums, and the byte at which each tensor begins. The checksums
    are those of the file as it can be read. Raises OSError.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    except Exception as error:  # safetensors' own, whose text has the reason
        raise OSError(f"{path}: {error}") from None
    # safetensors lets nobody else read it. Whoever may use the folder may use the file.
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            starts = _starts(data)
            return StoredFile(len(data), tuple(_checksums(data))), starts


def _starts(data: mmap.mmap) -> dict[str, int]:
    """Returns the byte at which each tensor of a safetensors file begins."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def _checksums(data: mmap.mmap) -> Iterator[int]:
    with memoryview(data) as view:
        for start in range(0, len(data), EXTENT_BYTES):
            yield zlib.crc32(view[start : start + EXTENT_BYTES])


def write_text(path: Path, text: str) -> None:
    """Writes a file beside `path`, has it on the disk, and gives it its name. Raises OSError."""
    beside = path.with_name(f".{path.name}.partial")
    with open_new(beside) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Removes a folder with all that it has, as far as that is possible; of a link, the link."""
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MappedFile:
    """A file of a checkpoint, mapped into memory. An extent is checked when it is read first.

    Only the pages that are read come into memory, and they belong to the page cache, not to the
    process. Raises CheckpointError if the file is not there or has another size than it should.
    """

    def __init__(self, folder: Path, name: str, manifest: Manifest) -> None:
        self._path, self._name, self._manifest = folder / name, name, manifest
        self._stored = manifest.files[name]
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != self._stored.num_bytes:
                    raise CheckpointError(
                        f"{self._path}: expected {self._stored.num_bytes} bytes, got {size}; it "
                        f"has {_some(self._tensors_from(size))}"
                    )
                # Nothing is written. But torch warns of memory that cannot be.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be read: {error.strerror}; it has "
                f"{_some(self._tensors_from(0))}"
            ) from None
        self._checked: set[int] = set()

    def block(self, tensor: str, block: Block, rows: tuple[int, int]) -> Tensor:
        """Returns rows [first, end) of a block, which share the file's memory.

        Raises CheckpointError if an extent of the file that they are in is damaged; it names the
        tensors of the extent.
        """
        stored = self._manifest.tensors[tensor]
        dtype, sizes = DTYPES[stored.dtype], list(block.sizes)
        row_bytes = stored.num_bytes(block) // max(1, sizes[0]) if sizes else dtype.itemsize
        start, end = block.start + rows[0] * row_bytes, block.start + rows[1] * row_bytes
        for extent in range(start // EXTENT_BYTES, -(-end // EXTENT_BYTES)):
            if self._is_damaged(extent):
                raise CheckpointError(self._problem(extent))
        if start == end:
            return torch.empty([rows[1] - rows[0], *sizes[1:]], dtype=dtype)
        count = (end - start) // dtype.itemsize
        flat = torch.frombuffer(self._data, dtype=dtype, count=count, offset=start)
        return flat.view([rows[1] - rows[0], *sizes[1:]] if sizes else [])

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

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with each damaged extent of the whole file."""
        for extent in range(len(self._stored.checksums)):
            if self._is_damaged(extent):
                yield self._problem(extent)

    def _problem(self, extent: int) -> str:
        start = extent * EXTENT_BYTES
        end = min(start + EXTENT_BYTES, len(self._data))
        return (
            f"{self._path} is damaged: bytes {start} to {end}, of "
            f"{_some(self._tensors_from(start, end))}, do not match their checksum"
        )

    def _tensors_from(self, start: int, end: int | None = None) -> list[str]:
        """Returns the tensors of which bytes lie in this part of the file."""
        found = []
        for name, tensor in self._manifest.tensors.items():
            for block in tensor.blocks:
                last = block.start + tensor.num_bytes(block)
                if block.file == self._name and last > start and (end is None or block.start < end):
                    found.append(name)
        return found


def _some(names: Sequence[str]) -> str:
    if not names:
        return "the names of the tensors"
    return f"{'tensors' if len(names) > 1 else 'tensor'} {first_of(names)}"


def find_problems(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None
) -> Iterator[str]:
    """Yields what is wrong with the files of a checkpoint, all of which are read.

    names: of the files; default all.
    """
    for name in manifest.files if names is None else names:
        try:
            yield from MappedFile(folder, name, manifest).problems()
        except CheckpointError as error:
            yield str(error)
