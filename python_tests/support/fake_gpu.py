"""A fake GPU for pipeline messages; its streams are CPU threads, its transfers go over gloo.

Like a GPU's, a stream runs its work in order while the host continues. A transfer that cannot end
blocks its stream, even if gloo has noticed that the neighbour is gone.
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
        self._events: list[Event] = []  # events not passed yet
        threading.Thread(target=self._run, daemon=True, name="fake stream").start()

    def run(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self, event: Event) -> None:
        self._events.append(event)
        self.run(lambda: (self._events.remove(event), event.passed.set()))

    def abort(self) -> None:
        """Marks all events as passed, without running the work before them."""
        for event in self._events:
            event.passed.set()

    def _run(self) -> None:
        try:
            while True:
                self._work.get()()
        except RuntimeError:  # the neighbour is gone, which a GPU would not notice
            return


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking  # otherwise the waiting thread would keep a core busy
        self.passed = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.mark(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


class Cuda:
    """The parts of torch.cuda that messages use. Each thread has its own current device, stream."""

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
    """A GPU with the fake streams.

    slow    maximum seconds by which the GPU lags behind the host at each event
    blocks  whether starting a transfer blocks the host until it ends, as NCCL's first one does
    """

    device: torch.device = DEVICE
    backend: str = "gloo"
    cuda: Cuda = field(default_factory=Cuda)
    slow: float = 0.0
    blocks: bool = False
    begun: list[dist.Work] = field(default_factory=list)  # transfers
    ended: list[dist.Work] = field(default_factory=list)
    used: list[torch.Size] = field(default_factory=list)  # shapes of the tensors used
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
    """Makes pipelines use this GPU in place of the CPU."""
    with mock.patch.object(pipeline, "gpu_of", lambda device: gpu):
        yield
