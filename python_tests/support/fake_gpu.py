"""A GPU for messages whose streams are threads of the CPU, and whose transfers go over gloo.

A stream runs what it is given in its order while the host goes on, as a GPU's does. A transfer that
cannot end keeps its stream, also where gloo has found out that the neighbour is gone.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.pipeline import pipeline
from axonn_ext.pipeline.gpu import Gpu

DEVICE = torch.device("cpu")


class Stream:
    def __init__(self, device: object = None) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        self._events: list[Event] = []  # that are not passed yet
        threading.Thread(target=self._run, daemon=True, name="fake stream").start()

    def run(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self, event: Event) -> None:
        self._events.append(event)
        self.run(lambda: (self._events.remove(event), event.passed.set()))

    def abort(self) -> None:
        """Passes all events without the work before them."""
        for event in self._events:
            event.passed.set()

    def _run(self) -> None:
        try:
            while True:
                self._work.get()()
        except RuntimeError:  # the neighbour is gone, of which a GPU learns nothing
            return


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking  # else the thread that waits would keep a core busy
        self.passed = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.mark(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


class Cuda:
    """What messages use of torch.cuda. The current device and stream are each thread's own."""

    Event = Event

    def __init__(self) -> None:
        self.computes = Stream()
        self.wires: list[Stream] = []
        self._here = threading.local()
        self.set_device(DEVICE)

    def Stream(self, device: torch.device) -> Stream:
        self.wires.append(Stream(device))
        return self.wires[-1]

    def set_device(self, device: torch.device) -> None:
        self._here.device = device

    def current_stream(self, device: torch.device) -> Stream:
        assert self._here.device == device, "a thread must say which device it uses"
        return getattr(self._here, "stream", self.computes)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(DEVICE)
        self._here.stream = stream
        yield
        self._here.stream = before


@dataclass(frozen=True)
class FakeGpu(Gpu):
    """slow: the most seconds for which the GPU is behind its host at each event.

    blocks: whether the host waits for the end of a transfer that it starts, as for NCCL's first.
    """

    device: torch.device = DEVICE
    backend: str = "gloo"
    cuda: Cuda = field(default_factory=Cuda)
    slow: float = 0.0
    blocks: bool = False
    begun: list[dist.Work] = field(default_factory=list)  # transfers
    ended: list[dist.Work] = field(default_factory=list)
    used: list[torch.Size] = field(default_factory=list)  # what was taken
    aborted: list[dist.ProcessGroup] = field(default_factory=list)

    def mark(self) -> Event:
        if self.slow:
            seconds = random.uniform(0, self.slow)
            self.cuda.current_stream(self.device).run(lambda: time.sleep(seconds))
        return super().mark()

    def follow(self, work: dist.Work) -> None:
        self.begun.append(work)
        if self.blocks:
            work.wait()
        self.cuda.current_stream(self.device).run(lambda: (work.wait(), self.ended.append(work)))

    def use_here(self, tensor: Tensor) -> Tensor:
        assert self.cuda.current_stream(self.device) is self.cuda.computes
        self.used.append(tensor.shape)
        return tensor

    def abort(self, group: dist.ProcessGroup) -> None:
        self.aborted.append(group)
        for stream in self.cuda.wires:
            stream.abort()


@contextmanager
def pipelines_on(gpu: FakeGpu) -> Iterator[None]:
    """Makes pipelines take the CPU for this GPU."""
    with mock.patch.object(pipeline, "gpu_of", lambda device: gpu):
        yield
