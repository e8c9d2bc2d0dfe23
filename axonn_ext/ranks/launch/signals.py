"""Notices signals even while the main thread waits for a peer."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType


class SignalListener:
    """A context that calls a function for each signal, in a separate thread.

    Python calls a handler in the main thread, which may wait for a peer for minutes. So each signal
    also writes a byte into a socket, which wakes the thread. The main thread must enter the
    listener, and a process can have only one at a time. The functions must return soon. From the
    second SIGINT on, KeyboardInterrupt is raised, too, as usual.
    """

    def __init__(self, hears: Mapping[signal.Signals, Callable[[signal.Signals], None]]) -> None:
        self._hears = dict(hears)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> SignalListener:
        self._ears, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in self._hears}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._wakes.close()  # so that the thread reads the end
        self._thread.join()
        self._ears.close()

    def _listen(self) -> None:
        while heard := self._ears.recv(64):
            for number in heard:
                if number in self._hears:
                    self._hears[signal.Signals(number)](signal.Signals(number))


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, without which the signal would end the process."""
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
