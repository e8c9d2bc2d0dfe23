"""Manifests of formats 1 and 2, which list every block and the checksums of every file.

They are read into the same Manifest as the current format; nothing writes them any more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonn_ext.checkpoint.layout import MOST, Block
from axonn_ext.checkpoint.manifest import (
    EXTENT_BYTES,
    Manifest,
    StoredFile,
    StoredTensor,
    block_key,
    itemsize_of,
)
from axonn_ext.checkpoint.values import decode

_FILE_NAME = re.compile(r"rank-\d{5,7}\.safetensors")
_RANDOM = re.compile(r"(rng\.\w+)\.(\d+)")


@dataclass(frozen=True)
class ListedBlocks:
    """The blocks of a whole tensor, which cover it once."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Block]:
        """Yields the blocks that share elements with a part of the whole tensor."""
        for block in self.blocks:
            if block.overlaps(offsets, sizes):
                yield block

    def blocks_of(self, file: str) -> Iterator[Block]:
        """Yields the blocks in a file."""
        return (block for block in self.blocks if block.file == file)


def manifest_of(body: Mapping[str, Any]) -> Manifest:
    """Returns the manifest. Raises KeyError, TypeError or ValueError if it makes no sense."""
    numbers = {name: file["num_bytes"] for name, file in body["files"].items()}
    starts: dict[str, dict[str, int]] = {name: {} for name in numbers}
    for name, num_bytes in numbers.items():
        count, checksums = -(-num_bytes // EXTENT_BYTES), body["files"][name]["checksums"]
        if not _FILE_NAME.fullmatch(name) or len(checksums) != count:
            raise ValueError(f"file {name!r} with {len(checksums)} checksums, not {count}")
    tensors = {
        name: _tensor_of(name, value, numbers, starts)
        for name, value in _with_random_rows(body["tensors"]).items()
    }
    extra, options = body["extra"], body["optimizer_options"]
    if body["format"] != 1:
        extra, options = decode(extra), decode(options)
    files = {
        name: StoredFile(number, tuple(body["files"][name]["checksums"]), starts[name])
        for name, number in numbers.items()
    }
    return Manifest(
        tensors, tuple(files), sum(numbers.values()), body["facts"], extra, tuple(options),
        listed=files,
    )  # fmt: skip


def _with_random_rows(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors with generator states as rows of one; they were one tensor per rank."""
    found, rows = dict(tensors), dict[str, dict[int, Any]]()
    for name, value in tensors.items():
        if match := _RANDOM.fullmatch(name):
            rows.setdefault(match[1], {})[int(match[2])] = value
            del found[name]
    for name, states in rows.items():
        (length,) = states[0]["shape"]
        if any(n not in states or states[n]["shape"] != [length] for n in range(len(states))):
            raise ValueError(f"{name}: expected a state of {length} numbers from each rank")
        found[name] = states[0] | {
            "shape": [len(states), length],
            "blocks": [
                block | {"offsets": [rank, *block["offsets"]], "sizes": [1, *block["sizes"]]}
                for rank, state in sorted(states.items())
                for block in state["blocks"]
            ],
        }
    return found


def _tensor_of(
    name: str, value: Mapping[str, Any], files: Mapping[str, int],
    starts: Mapping[str, dict[str, int]],
) -> StoredTensor:  # fmt: skip
    shape, itemsize = tuple(value["shape"]), itemsize_of(name, value["dtype"])
    blocks = []
    for each in value["blocks"]:
        block = Block(tuple(each["offsets"]), tuple(each["sizes"]), each["file"])
        numbers = (each["start"], *block.offsets, *block.sizes, *shape)
        if not all(type(n) is int and 0 <= n <= MOST for n in numbers):
            raise ValueError(f"tensor {name}: expected whole numbers from 0 to {MOST}")
        inside = all(
            offset + size <= whole
            for offset, size, whole in zip(block.offsets, block.sizes, shape, strict=True)
        )
        end = each["start"] + math.prod(block.sizes) * itemsize
        if not inside or end > files[block.file]:
            raise ValueError(f"tensor {name}: a block that is not inside it or its file")
        starts[block.file][block_key(name, block.offsets)] = each["start"]
        blocks.append(block)
    volume = sum(math.prod(block.sizes) for block in blocks)
    distinct = len({block.offsets for block in blocks}) == len(blocks)
    if volume != math.prod(shape) or not distinct or _overlap(blocks, len(shape)):
        raise ValueError(f"tensor {name}: its blocks do not cover it once")
    return StoredTensor(value["dtype"], ListedBlocks(shape, tuple(blocks)))


def _overlap(blocks: Sequence[Block], num_dims: int) -> bool:
    """Whether two of the blocks share an element.

    A sweep along the dimension with the most distinct offsets compares each block with those that
    have not ended yet: only a few, if the blocks are those of a grid.
    """
    filled = [block for block in blocks if all(block.sizes)]
    most = max(range(num_dims), key=lambda d: len({b.offsets[d] for b in filled}), default=0)
    under_way: list[Block] = []
    for new in sorted(filled, key=lambda block: block.offsets[most : most + 1]):
        under_way = [b for b in under_way if b.offsets[most] + b.sizes[most] > new.offsets[most]]
        if any(old.overlaps(new.offsets, new.sizes) for old in under_way):
            return True
        under_way.append(new)
    return False
