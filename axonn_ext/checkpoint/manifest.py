"""The manifest of a checkpoint: which tensors it has, where their bytes are, and their checksums.

It is JSON with a checksum of itself. Whatever is read from it is checked before it is used, since
it may be damaged, or written by somebody else.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.values import decode, encode
from axonn_ext.inputs.errors import InputError
from axonn_ext.inputs.files import parse_json, read_text

MANIFEST = "manifest.json"
FORMATS = (1, 2)  # that are read; in 1, values were as JSON has them. The last is written
EXTENT_BYTES = 1 << 20  # a file has a checksum for each extent of so many bytes
_MOST_BYTES = 1 << 32  # of a manifest: some hundred bytes for each block of a tensor
_MOST = 1 << 62  # of elements, or bytes of a file: the sum of two numbers fits 64 bits
# The whole file: the checksum of the text of "checkpoint", and that text.
_FRAME = re.compile(r'\{"crc32": (\d{1,10}), "checkpoint": (\{.*\})\}\n', re.DOTALL)
_FILE_NAME = re.compile(r"rank-\d{5,7}\.safetensors")
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        )
    }
)


@dataclass(frozen=True)
class Block:
    """A block of a whole tensor, contiguous in a file from byte `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, whose blocks cover it once."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def num_bytes(self, block: Block) -> int:
        """Returns the bytes of a block of this tensor."""
        return math.prod(block.sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StoredFile:
    """A file of tensors. checksums: the CRC-32 of each extent of EXTENT_BYTES; the last is shorter.

    A CRC-32 notices every change of up to 32 consecutive bits, and of all others all but one in
    four billion.
    """

    num_bytes: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has.

    facts  what is known about the job that wrote it: step, grid, versions
    extra  what the user added: values of the types in `values`
    """

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    facts: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.files.values())

    def to_json(self) -> str:
        """Returns the text of the file."""
        body = {
            "format": FORMATS[-1],
            "extent_bytes": EXTENT_BYTES,
            "facts": self.facts,
            "extra": encode(dict(self.extra), "extra"),
            "optimizer_options": encode(list(self.optimizer_options), "optimizer_options"),
            "files": self.files,
            "tensors": self.tensors,
        }
        text = json.dumps(body, default=vars, separators=(",", ":"))
        return f'{{"crc32": {zlib.crc32(text.encode())}, "checkpoint": {text}}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint's folder.

    Raises CheckpointError if there is none, or if it is damaged.
    """
    path = folder / MANIFEST
    try:
        found = _FRAME.fullmatch(read_text(path, most_bytes=_MOST_BYTES))
        if found is None or zlib.crc32(found[2].encode()) != int(found[1]):
            raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
        body = parse_json(found[2], path)
    except InputError as error:
        raise CheckpointError(f"{folder} is no checkpoint that can be used: {error}") from None
    try:
        if body["format"] not in FORMATS or body["extent_bytes"] != EXTENT_BYTES:
            raise CheckpointError(
                f"{path}: expected format {FORMATS[-1]} with extents of {EXTENT_BYTES} bytes, got "
                f"format {body['format']!r}: another version of axonn_ext wrote it"
            )
        return _manifest_of(body, path)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no manifest of a checkpoint: {type(error).__name__}: {error}"
        ) from None


def _manifest_of(body: Mapping[str, Any], path: Path) -> Manifest:
    files = {
        name: StoredFile(file["num_bytes"], tuple(file["checksums"]))
        for name, file in body["files"].items()
    }
    for name, file in files.items():
        count = -(-file.num_bytes // EXTENT_BYTES)
        if not _FILE_NAME.fullmatch(name) or len(file.checksums) != count:
            raise ValueError(f"file {name!r} with {len(file.checksums)} checksums, not {count}")
    tensors = {name: _tensor_of(name, value, files) for name, value in body["tensors"].items()}
    facts, extra, options = (body[key] for key in ("facts", "extra", "optimizer_options"))
    if body["format"] != 1:
        extra, options = decode(extra), decode(options)
    if not all(isinstance(each, dict) for each in (facts, extra, *options)):
        raise ValueError("facts, extra and optimizer_options must be objects")
    return Manifest(tensors, files, facts, extra, tuple(options))


def _tensor_of(
    name: str, value: Mapping[str, Any], files: Mapping[str, StoredFile]
) -> StoredTensor:
    blocks = tuple(
        Block(tuple(c["offsets"]), tuple(c["sizes"]), c["file"], c["start"])
        for c in value["blocks"]
    )
    tensor = StoredTensor(value["dtype"], tuple(value["shape"]), blocks)
    numbers = (n for c in blocks for n in (c.start, *c.offsets, *c.sizes))
    if not all(type(n) is int and 0 <= n <= _MOST for n in (*tensor.shape, *numbers)):
        raise ValueError(f"tensor {name}: expected whole numbers from 0 to {_MOST}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {name}: expected a dtype of {', '.join(DTYPES)}")
    for block in blocks:
        inside = all(
            offset + size <= whole
            for offset, size, whole in zip(block.offsets, block.sizes, tensor.shape, strict=True)
        )
        end = block.start + tensor.num_bytes(block)
        if not inside or end > files[block.file].num_bytes:
            raise ValueError(f"tensor {name}: a block that is not inside of it or of its file")
    volume = sum(math.prod(block.sizes) for block in blocks)
    distinct = len({c.offsets for c in blocks}) == len(blocks)
    if volume != math.prod(tensor.shape) or not distinct or _overlap(blocks, len(tensor.shape)):
        raise ValueError(f"tensor {name}: its blocks do not cover it once")
    return tensor


def _overlap(blocks: Sequence[Block], num_dims: int) -> bool:
    """Whether two of the blocks share an element.

    They are met in the order of the dimension that splits them most, next to those that have not
    ended there: few, where the blocks are those of a grid.
    """
    filled = [block for block in blocks if all(block.sizes)]
    dims = range(num_dims)
    most = max(dims, key=lambda dim: len({b.offsets[dim] for b in filled}), default=0)
    under_way: list[Block] = []
    for new in sorted(filled, key=lambda block: block.offsets[most : most + 1]):
        under_way = [b for b in under_way if b.offsets[most] + b.sizes[most] > new.offsets[most]]
        for old in under_way:
            if all(
                old.offsets[dim] < new.offsets[dim] + new.sizes[dim]
                and new.offsets[dim] < old.offsets[dim] + old.sizes[dim]
                for dim in dims
            ):
                return True
        under_way.append(new)
    return False
