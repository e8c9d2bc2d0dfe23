"""Changes the JSON files of a checkpoint so that their checksums still match."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

from axonn_ext.checkpoint.manifest import MANIFEST


def tamper(folder: Path, change: Callable[[dict], object], file: str = MANIFEST) -> None:
    """Changes a manifest or an index, and updates its checksum."""
    kind = "checkpoint" if file == MANIFEST else "index"
    body = json.loads((folder / file).read_text())[kind]
    change(body)
    text = json.dumps(body)
    (folder / file).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "{kind}": {text}}}\n')
