"""Stores that count their calls and bytes, or that never answer."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from limits import HANG_SECONDS


class CountingStore(Store):
    """Passes everything on to another store, and counts; its clones share the counts.

    A HashStore wakes every waiting thread whenever any key is set; with thousands of threads, that
    takes minutes. With `events`, which all stores of a job share, a thread waits for the event of
    its key instead.

    operations: calls so far, by name. num_bytes: bytes of keys and values, in both directions.
    """

    def __init__(
        self, store: Store, events: dict[str, threading.Event] | None = None,
        counts: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inner = store
        self.events = events
        self.operations: dict[str, int] = {} if counts is None else counts

    @property
    def count(self) -> int:
        return sum(count for name, count in self.operations.items() if name != "bytes")

    @property
    def num_bytes(self) -> int:
        return self.operations.get("bytes", 0)

    def clone(self) -> CountingStore:
        return CountingStore(self.inner.clone(), self.events, self.operations)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def add(self, key: str, value: int) -> int:
        return self._ask("add", key, value)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys if self.events is not None else ():
            event = self.events.setdefault(key, threading.Event())
            if not self.inner.check([key]):
                event.wait(timeout.total_seconds())
        self._ask("wait", keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask("multi_get", keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self.operations[name] = self.operations.get(name, 0) + 1
        answer = getattr(self.inner, name)(*arguments)
        if self.events is not None and name in ("set", "add", "compare_set"):
            self.events.setdefault(arguments[0], threading.Event()).set()
        size = _size(arguments) + _size(answer)
        self.operations["bytes"] = self.operations.get("bytes", 0) + size
        return answer


class SilentStore(CountingStore):
    """A store whose host does not answer until `silence` is set, and is gone afterwards."""

    def __init__(self, store: Store, silence: threading.Event) -> None:
        super().__init__(store)
        self.silence = silence

    def clone(self) -> SilentStore:
        return self

    def _ask(self, name: str, *arguments: Any) -> Any:
        self.silence.wait(HANG_SECONDS)
        raise RuntimeError("the host of the store has ended")


def _size(value: Any) -> int:
    """The bytes of keys and values; every number counts as one digit."""
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        return len(re.sub(r"[0-9]+", "0", value))
    if isinstance(value, Sequence):
        return sum(map(_size, value))
    return 8 if isinstance(value, int) else 0
