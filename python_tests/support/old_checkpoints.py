"""Checkpoints in the old format, whose manifest lists all blocks and checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axonn_ext.checkpoint.manifest import MANIFEST, block_key, index_name
from axonn_ext.checkpoint.reading import read_manifest


def tamper(folder: Path, change: Callable[[dict], object], file: str = MANIFEST) -> None:
    """Changes a manifest or an index, and updates its checksum."""
    kind = "checkpoint" if file == MANIFEST else "index"
    body = json.loads((folder / file).read_text())[kind]
    change(body)
    rewrite(folder / file, kind, body)


def rewrite(path: Path, kind: str, body: dict[str, Any]) -> None:
    text = json.dumps(body)
    path.write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "{kind}": {text}}}\n')


def as_format_2(folder: Path) -> None:
    """Converts a checkpoint to format 2, in place."""
    manifest = read_manifest(folder)
    body = json.loads((folder / MANIFEST).read_text())["checkpoint"]
    indexes = {name: manifest.index(folder, name) for name in manifest.files}
    tensors: dict[str, Any] = {}
    for name, tensor in manifest.tensors.items():
        blocks = [
            vars(block) | {"start": indexes[block.file].starts[block_key(name, block.offsets)]}
            for block in tensor.layout.overlapping((0,) * len(tensor.shape), tensor.shape)
        ]
        if name.startswith("rng."):
            for rank, block in enumerate(blocks):
                block |= {"offsets": [0], "sizes": tensor.shape[1:]}
                tensors[f"{name}.{rank}"] = {
                    "dtype": tensor.dtype, "shape": tensor.shape[1:], "blocks": [block]
                }  # fmt: skip
        else:
            tensors[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "blocks": blocks}
    files = {
        name: {"num_bytes": index.num_bytes, "checksums": index.checksums}
        for name, index in indexes.items()
    }
    kept = ("extent_bytes", "facts", "extra", "optimizer_options")
    body = {key: body[key] for key in kept}
    body |= {"format": 2, "files": files, "tensors": tensors}
    rewrite(folder / MANIFEST, "checkpoint", body)
    for name in indexes:
        (folder / index_name(name)).unlink()
