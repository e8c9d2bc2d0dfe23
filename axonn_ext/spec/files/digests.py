"""Digests of files, which ranks compare; large files are only sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

WHOLE = 1 << 24  # up to this many units, such as bytes, everything is read
_BLOCKS, _BLOCK = 64, 1 << 16


def sampled(count: int) -> Iterator[tuple[int, int]]:
    """Yields the (start, length) of the parts of `count` units that go into a digest.

    These are all, or 64 equally spaced blocks of 65,536, including the first and the last.
    """
    if count <= WHOLE:
        starts = list(range(0, count, _BLOCK))
    else:
        starts = [i * (count - _BLOCK) // (_BLOCKS - 1) for i in range(_BLOCKS)]
    for start in starts:
        yield start, min(_BLOCK, count - start)


def digest_of_files(paths: Iterable[Path]) -> str:
    """Returns the total bytes of files and a digest of names, sizes and sampled contents.

    Raises OSError for a file that cannot be read.
    """
    digest, total = hashlib.sha256(), 0
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        total += size
        with path.open("rb") as stream:
            for start, count in sampled(size):
                stream.seek(start)
                digest.update(stream.read(count))
    return f"{total:,} bytes ({digest.hexdigest()[:12]})"
