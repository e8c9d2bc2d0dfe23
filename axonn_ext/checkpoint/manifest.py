"""The JSON files of a checkpoint: a manifest of the tensors, and an index next to each file.

The manifest says how the ranks of a grid held each tensor, so its size does not depend on their
number; `layout` derives from it which file has which block. An index says where in its file each
block begins, and has the file's checksums. Both carry their own checksum, and everything read from
them is checked before use, since it may be damaged or written by somebody else.
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
from axonn_ext.checkpoint.layout import MOST, Layout
from axonn_ext.checkpoint.runs import Offsets
from axonn_ext.checkpoint.values import encode
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import parse_json, read_text

MANIFEST = "manifest.json"
FORMAT = 3
EXTENT_BYTES = 1 << 20  # a file has one checksum per extent of this size
MOST_BYTES = 1 << 32  # of a manifest: some hundred bytes per tensor, and what the user adds
_MOST_INDEX_BYTES = 1 << 30  # of an index: about a hundred bytes per block of the file
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
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
class StoredTensor:
    """A whole tensor."""

    dtype: str
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """Returns the bytes of a block of these sizes."""
        return math.prod(sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StoredFile:
    """A file of tensors.

    checksums: the CRC-32 of each extent of EXTENT_BYTES; the last is shorter. starts: the byte at
    which each block begins, by `block_key`.

    A CRC-32 detects every change of up to 32 consecutive bits, and all but one in four billion of
    the others.
    """

    num_bytes: int
    checksums: tuple[int, ...]
    starts: Mapping[str, int]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    num_bytes  the total size of the tensor files
    facts      about the job that wrote it: step, grid, versions
    extra      the user's values, of the types in `values`
    token      a random string, repeated in the index of each file
    """

    tensors: Mapping[str, StoredTensor]
    files: Sequence[str]
    num_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: tuple[Mapping[str, Any], ...] = ()
    token: str = ""

    def to_json(self) -> str:
        """Returns the text of the file."""
        body = {
            "format": FORMAT,
            "extent_bytes": EXTENT_BYTES,
            "token": self.token,
            "facts": self.facts,
            "extra": encode(dict(self.extra), "extra"),
            "optimizer_options": encode(list(self.optimizer_options), "optimizer_options"),
            "num_files": len(self.files),
            "num_bytes": self.num_bytes,
            "tensors": {name: table_entry(each) for name, each in sorted(self.tensors.items())},
        }
        return _framed("checkpoint", body)

    def index(self, folder: Path, file: str) -> StoredFile:
        """Returns the index of a file. Raises CheckpointError if it is missing or damaged."""
        return read_index(folder, file, self.token)

    def check_last_file(self, folder: Path) -> None:
        """Raises CheckpointError unless the last file has an index.

        Call it before working on all files: a wrong manifest may name millions.
        """
        path = folder / index_name(self.files[-1])
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, the last of {len(self.files)}")


def block_key(name: str, offsets: Offsets) -> str:
    """Returns the name of a block of a tensor inside a file."""
    return f"{name}@{','.join(map(str, offsets))}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in manifests."""
    return str(dtype).removeprefix("torch.")


def table_entry(tensor: StoredTensor) -> dict[str, Any]:
    """Returns a tensor's entry in the manifest."""
    return {"dtype": tensor.dtype, **vars(tensor.layout)}


def _framed(kind: str, body: Mapping[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"))
    return f'{{"crc32": {zlib.crc32(text.encode())}, "{kind}": {text}}}\n'


def read_framed(path: Path, kind: str, most_bytes: int) -> Any:
    """Returns the body. Raises CheckpointError if it is damaged, InputError if it is not text."""
    text = read_text(path, most_bytes=most_bytes)
    found = re.fullmatch(rf'{{"crc32": (\d{{1,10}}), "{kind}": (\{{.*\}})}}\n', text, re.DOTALL)
    if found is None or zlib.crc32(found[2].encode()) != int(found[1]):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
    return parse_json(found[2], path)


def tensor_of(name: str, value: Mapping[str, Any], num_files: int) -> StoredTensor:
    """Returns the tensor of a `table_entry`. Raises KeyError, TypeError or ValueError."""
    if value["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name}: expected a dtype of {', '.join(DTYPES)}")
    try:
        layout = Layout(
            tuple(value["grid"]), tuple(value["shape"]), tuple(map(tuple, value["dims"])),
            value["padding"], {axis: tuple(places) for axis, places in value["where"].items()},
            tuple(map(tuple, value["runs"])), value["turn"],
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from None
    if layout.num_ranks != num_files:
        raise ValueError(f"tensor {name}: a grid of {layout.num_ranks} ranks, not {num_files}")
    return StoredTensor(value["dtype"], layout)


def index_name(file: str) -> str:
    """Returns the name of the index of a file."""
    return file.replace(".safetensors", ".json")


def index_text(file: str, stored: StoredFile, token: str) -> str:
    """Returns the text of the index of a file."""
    return _framed("index", {"token": token, "file": file, **vars(stored)})


def read_index(folder: Path, file: str, token: str) -> StoredFile:
    """Returns the index of a file. Raises CheckpointError if it is missing or damaged."""
    path = folder / index_name(file)
    try:
        body = read_framed(path, "index", _MOST_INDEX_BYTES)
        stored = StoredFile(body["num_bytes"], tuple(body["checksums"]), dict(body["starts"]))
        for what, got, expected in (
            ("file", body["file"], file), ("checkpoint", body["token"], token)
        ):  # fmt: skip
            if got != expected:
                raise CheckpointError(
                    f"{path} belongs to another {what}: expected {expected}, got {str(got)[:40]}"
                )
        numbers = (stored.num_bytes, *stored.checksums, *stored.starts.values())
        if not all(type(n) is int and 0 <= n <= MOST for n in numbers):
            raise ValueError(f"expected whole numbers from 0 to {MOST}")
        if stored.num_bytes < 8:
            raise ValueError(f"expected at least the 8 bytes of a header, got {stored.num_bytes}")
        if len(stored.checksums) != -(-stored.num_bytes // EXTENT_BYTES):
            raise ValueError(f"{len(stored.checksums)} checksums for {stored.num_bytes} bytes")
    except InputError as error:
        raise CheckpointError(str(error)) from None
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is not the index of a file: {type(error).__name__}: {error}"
        ) from None
    return stored
