"""Tables of an epoch's order, kept in files next to the corpus, so that a resumed run reads them.

A file has 64-bit words, then their SHA-256. Its name has a digest of the table's inputs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGEST_BYTES = hashlib.sha256().digest_size


class Shelf(NamedTuple):
    """Where the tables of a corpus are, and an identity that changes with its files."""

    folder: Path
    identity: str


def kept(
    shelf: Shelf | None, depends_on: object, epoch: int, compute: Callable[[], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Returns the result of `compute`, read from the shelf if it is there.

    One process computes a new table, while others on the host wait for it. It also removes tables
    of changed files and past epochs. If it ends without a table, each waiting process computes its
    own. Where nothing can be written, nothing is kept, and each process computes the table.

    shelf: None keeps nothing. depends_on: further inputs of the table, with a stable repr.
    """
    if shelf is None:
        return compute()
    key = hashlib.sha256(repr((shelf.identity, depends_on)).encode()).hexdigest()[:16]
    own = f"{_short(shelf.identity)}-{key}-"
    path = shelf.folder / f"{own}{epoch}.ends"
    partial = path.with_suffix(".partial")
    with suppress(OSError, ValueError):
        return _read(path)
    try:
        shelf.folder.mkdir(exist_ok=True)
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError:
        return compute()
    with file:
        is_first = _lock(file)
        try:
            with suppress(OSError, ValueError):
                return _read(path)
            table = compute()
            with suppress(OSError):
                if is_first:
                    _write(file, table)
                    partial.rename(path)
                    _remove_others(path, own, epoch)
            return table
        finally:
            with suppress(OSError):
                partial.unlink()


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _read(path: Path) -> NDArray[np.int64]:
    """Returns the table in a file. Raises ValueError if it is damaged."""
    content = path.read_bytes()
    words, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(words).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return np.frombuffer(words, dtype="<i8")


def _lock(file: BinaryIO) -> bool:
    """Returns True if no other process has locked the file; else waits until it is unlocked.

    The system unlocks the file when its process ends. File systems without locks lock nothing.
    """
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
            return False
    return True


def _write(file: BinaryIO, table: NDArray[np.int64]) -> None:
    """Writes the file; without locks several processes may do so, but they write the same bytes."""
    words = table.astype("<i8").tobytes()
    file.write(words + hashlib.sha256(words).digest())
    file.truncate()  # an earlier process may have left more
    file.flush()


def _remove_others(path: Path, own: str, epoch: int) -> None:
    """Removes tables of changed files, and of epochs before the previous one."""
    for other in path.parent.glob("*.ends"):
        number = re.fullmatch(re.escape(own) + r"(\d+)", other.stem)
        is_past = number is not None and int(number[1]) < epoch - 1
        if is_past or not other.name.startswith(own.partition("-")[0]):
            other.unlink(missing_ok=True)
