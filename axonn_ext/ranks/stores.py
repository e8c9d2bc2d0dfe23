"""Operations on the store in which ranks meet, for any kind of c10d store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, Store

BATCH = 256  # keys per operation


def comes(store: Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Returns whether all keys are set within the timeout.

    Raises: DistNetworkError if the process that serves the store has ended.
    """
    try:
        store.wait(list(keys), timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # c10d's stores raise several kinds
        return False
    return True


def read(store: Store, key: str) -> bytes:
    """Returns the value of a key that is set, in one operation: `get` takes two, since it waits."""
    return store.compare_set(key, "", "")


def absent(store: Store, keys: Sequence[str]) -> list[int]:
    """Returns the indices of keys that are not set; cheap if most are set."""
    found: list[int] = []
    for first in range(0, len(keys), BATCH):
        batch = keys[first : first + BATCH]
        if not store.check(list(batch)):
            found += [first + i for i, key in enumerate(batch) if not store.check([key])]
    return found


def file_name(text: object) -> str:
    """Returns a name that came from the store if it is a plain file name, without a folder.

    Raises: ValueError for any other text.
    """
    if not isinstance(text, str) or text in ("", ".", "..") or "/" in text or "\0" in text:
        raise ValueError(f"the store must have the name of a file, got {str(text)[:100]!a}")
    return text
