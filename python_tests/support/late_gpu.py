"""A substitute for torch.cuda whose streams copy late, each in its own thread."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from limits import HANG_SECONDS


class Event:
    """Is done when its stream reaches it."""

    def __init__(self, blocking: bool = False) -> None:
        self._done = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.do(self._done.set)

    def synchronize(self) -> None:
        if not self._done.wait(HANG_SECONDS):
            raise AssertionError("an event never happened")


class Stream:
    """Runs its work in order, each piece after a short random delay."""

    def __init__(self, device: object = None) -> None:
        self._work: queue.Queue[Callable[[], Any]] = queue.Queue()
        self._random = random.Random(0)
        threading.Thread(target=self._run, daemon=True).start()

    def do(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.do(event.synchronize)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._random.random() * 1e-3)
            work()


class Program(Stream):
    """The program's own stream, the CPU, which runs its work immediately."""

    def __init__(self) -> None:
        """Starts no thread."""

    def do(self, work: Callable[[], Any]) -> None:
        work()


class _Copies(TorchFunctionMode):
    """Redirects non-blocking copies to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            self._stream.do(lambda: target.data.copy_(source))
            return target
        return function(*args, **(kwargs or {}))


class Gpu:
    """The parts of torch.cuda that a StreamCrossing uses."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._program = Program()

    def current_stream(self, device: object = None) -> Stream:
        return self._program

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Copies(stream):
            yield
