"""Reaches all ranks at once: each waits in the store for the next ring, and polls nothing.

So an idle rank costs the store nothing, and the cost of a ring per rank does not depend on their
number.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

from torch.distributed import FileStore, PrefixStore, Store

from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import comes, read

LEAVE_SECONDS = 2.0  # how long leaving may take if the store does not answer
_POLL_SECONDS = 0.25  # a FileStore would look for a key every 10 ms while it waits
_WAIT = timedelta(hours=12)  # for one wait; c10d prints a warning when it times out
_LEFT = "left"  # the topic of a rank that wakes its own thread


@dataclass(frozen=True)
class Ring:
    """A ring and its text. store: the client of the bell's thread, for use only in that thread."""

    number: int
    text: str
    store: Store


class Bell:
    """Calls functions on every rank when a rank rings. All ranks must enter it as a context.

    Rings are numbered. A ring and its text are one key, set by one operation, so a rank that dies
    while it rings leaves no gap that would hide later rings.

    store: a client for short operations of any thread; the main thread may wait in its own.
    """

    def __init__(self, store: Store, process: Process) -> None:
        self.store: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._ears: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._world_size = process.world_size
        self._polls = isinstance(_innermost(store), FileStore)
        self._hears: dict[str, Callable[[Ring], None]] = {}
        self._next = 0
        self._first: dict[str, int] = {}  # the number of each topic's first ring
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="bell", daemon=True)

    def __enter__(self) -> Bell:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._left.set()
        if not self._polls:
            # After a failure, the store may not answer.
            patience = LEAVE_SECONDS if error is None else 0.0
            leaving = threading.Thread(target=self._wake_itself, args=[patience], daemon=True)
            leaving.start()
            leaving.join(patience + LEAVE_SECONDS)
        self._thread.join(LEAVE_SECONDS)

    def hears(self, topic: str, function: Callable[[Ring], None]) -> None:
        """Makes the bell's thread call `function`, which must return soon, on rings for `topic`."""
        self._hears[topic] = function

    def ring(self, topic: str, text: str, *, since: int | None = None) -> None:
        """Rings, from any thread, unless there is a ring for the topic numbered `since` or later.

        since: default: unless there is any ring for the topic.

        Raises: DistError if the process that serves the store has ended.
        """
        said = json.dumps([topic, text])
        if since is None:
            since = self._first.get(topic, self._next)
        while _topic(self.store.compare_set(_key(since), "", said)) != topic:
            since += 1

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the process that serves the store has ended
            while not self._left.is_set():
                key = _key(self._next)
                if self._polls:
                    if not self._ears.check([key]):
                        self._left.wait(_POLL_SECONDS)
                        continue
                elif not comes(self._ears, [key], _WAIT):
                    continue
                topic, text = json.loads(read(self._ears, key))
                ring = Ring(self._next, text, self._ears)
                self._first.setdefault(topic, self._next)
                self._next += 1
                if topic in self._hears:
                    self._hears[topic](ring)

    def _wake_itself(self, patience: float) -> None:
        """Ends the thread's wait: the last rank to leave rings for all."""
        with suppress(RuntimeError):
            if self.store.add("bell/left", 1) < self._world_size:
                self._thread.join(patience)
            if self._thread.is_alive():  # any ring wakes it
                self.store.compare_set(_key(self._next), "", json.dumps([_LEFT, ""]))


def _key(number: int) -> str:
    return f"bell/{number}"


def _topic(said: bytes) -> str:
    return str(json.loads(said)[0])


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
