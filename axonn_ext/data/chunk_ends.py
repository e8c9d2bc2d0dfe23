"""Tables of an epoch's order, kept in files next to the corpus, so that a resumed run reads them.

A file has 64-bit words and then their SHA-256. Its name has a digest of what the table depends on.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_CLAIM_SECONDS = 600.0  # after which the process that began to write a table has surely ended
_DIGEST_BYTES = hashlib.sha256().digest_size


class Shelf(NamedTuple):
    """Where the tables of a corpus are, and what changes with its files."""

    folder: Path
    identity: str


def kept(
    shelf: Shelf | None, depends_on: object, epoch: int, compute: Callable[[], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Returns the table that `compute` returns, read from the shelf if it is there.

    One process keeps a table that is new; it removes those of changed files and past epochs. Where
    nothing can be written, nothing is kept.

    shelf: None keeps nothing. depends_on: what else the table depends on; has a stable repr.
    """
    if shelf is None:
        return compute()
    key = hashlib.sha256(repr((shelf.identity, depends_on)).encode()).hexdigest()[:16]
    own = f"{_short(shelf.identity)}-{key}-"
    path = shelf.folder / f"{own}{epoch}.ends"
    with suppress(OSError, ValueError):
        return _read(path)
    table = compute()
    with suppress(OSError):
        if _keep(path, table):
            _remove_others(path, own, epoch)
    return table


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _read(path: Path) -> NDArray[np.int64]:
    """Raises ValueError if the file is damaged."""
    content = path.read_bytes()
    words, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(words).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return np.frombuffer(words, dtype="<i8")


def _keep(path: Path, table: NDArray[np.int64]) -> bool:
    """Writes the file, unless another process does; returns whether it has."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    with suppress(FileNotFoundError):
        if time.time() - partial.stat().st_mtime > _CLAIM_SECONDS:
            partial.unlink()
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        words = table.astype("<i8").tobytes()
        with os.fdopen(descriptor, "wb") as file:
            file.write(words + hashlib.sha256(words).digest())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return True


def _remove_others(path: Path, own: str, epoch: int) -> None:
    """Removes the tables of other files than today's, and of epochs before the last one."""
    for other in path.parent.glob("*.ends"):
        number = re.fullmatch(re.escape(own) + r"(\d+)", other.stem)
        is_past = number is not None and int(number[1]) < epoch - 1
        if is_past or not other.name.startswith(own.partition("-")[0]):
            other.unlink(missing_ok=True)
