"""Writes a rank's blocks to its file, and reads blocks from the files that have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import MappedFile, write_tensors, write_text
from axonn_ext.checkpoint.layout import Block
from axonn_ext.checkpoint.manifest import DTYPES, Manifest, StoredFile, index_name, index_text
from axonn_ext.checkpoint.runs import Offsets
from axonn_ext.checkpoint.shards import Shard
from axonn_ext.spec.files.errors import first_of


def write_file(
    folder: Path, name: str, blocks: Mapping[str, Tensor], token: str, *,
    beat: Callable[[], None] = lambda: None,
) -> StoredFile:  # fmt: skip
    """Writes the blocks, by `block_key`, to a file, and its index. Raises OSError."""
    stored = write_tensors(folder / name, blocks, beat=beat)
    write_index(folder, name, stored, token)
    return stored


def write_index(folder: Path, name: str, stored: StoredFile, token: str) -> None:
    """Writes the index of a file. Raises OSError."""
    write_text(folder / index_name(name), index_text(name, stored, token))


class Reading:
    """Parts of a checkpoint to read into tensors, by file.

    Only the files with such parts, and their indexes, are opened, one at a time.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._wanted: defaultdict[str, list[tuple[str, Block, Offsets]]] = defaultdict(list)

    def add(self, name: str, offsets: Offsets, sizes: tuple[int, ...]) -> None:
        """Adds a part of a whole tensor."""
        for block in self._manifest.tensors[name].layout.overlapping(offsets, sizes):
            self._wanted[block.file].append((name, block, offsets))

    def check(self) -> None:
        """Raises CheckpointError unless there are files with all these blocks."""
        for file in self._wanted:
            self._opened(file)

    def read(
        self, targets: Mapping[str, Shard], *, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Copies all added parts into blocks of the targets. Raises CheckpointError."""
        for file_name, wanted in self._wanted.items():
            file = self._opened(file_name)
            for name, block, offsets in wanted:
                beat()
                dtype = DTYPES[self._manifest.tensors[name].dtype]
                _copy(file, name, block, offsets, targets[name].blocks[offsets].detach(), dtype)

    def _opened(self, file_name: str) -> MappedFile:
        wanted = self._wanted[file_name]
        names = [*dict.fromkeys(name for name, *_ in wanted)]
        file = MappedFile(self._folder, file_name, self._manifest, names)
        if missing := file.missing(((name, block) for name, block, _ in wanted), self._manifest):
            raise CheckpointError(
                f"{self._folder / index_name(file_name)}: has no whole block of {first_of(missing)}"
            )
        return file


def _copy(
    file: MappedFile, name: str, block: Block, offsets: Offsets, target: Tensor, dtype: torch.dtype
) -> None:
    """Copies the overlap of a block and a target, which begins at `offsets`."""
    source = None
    for dim, (begin, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        first = max(begin, offsets[dim])
        last = min(begin + size, offsets[dim] + target.shape[dim])
        # Whole rows are contiguous in the file; the columns are selected from each.
        if source is None:
            source = file.rows(name, dtype, block, (first - begin, last - begin))
        else:
            source = source.narrow(dim, first - begin, last - first)
        target = target.narrow(dim, first - offsets[dim], last - first)
    target.copy_(file.rows(name, dtype, block, (0, 1)) if source is None else source)


def read_shards(
    folder: Path, manifest: Manifest, targets: Mapping[str, Shard], *,
    beat: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Reads these blocks from a checkpoint. Raises CheckpointError."""
    reading = Reading(folder, manifest)
    for name, shard in targets.items():
        for offsets, tensor in shard.blocks.items():
            reading.add(name, offsets, tuple(tensor.shape))
    reading.read(targets, beat=beat)
