"""Uses threads as ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from limits import HANG_SECONDS


def together(actions: Sequence[Callable[[], object]]) -> None:
    """Runs each action in a thread, and returns when all have ended."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads)


@contextmanager
def many_threads() -> Iterator[None]:
    """Lets thousands of threads wait for Python's GIL without requesting it every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
