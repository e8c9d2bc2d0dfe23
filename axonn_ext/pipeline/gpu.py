"""The GPU operations of a pipeline's threads, and the limit on how far the host runs ahead."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.pipeline.failures import Failures

_SLEEP_SECONDS = 1e-4  # much shorter than a task, without keeping a core busy


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU. Tests use other backends, and a substitute for torch.cuda."""

    device: torch.device
    backend: str = "nccl"
    cuda: Any = torch.cuda

    def mark(self) -> torch.Event:
        """Returns an event that the GPU passes when the current stream reaches this point.

        Its `synchronize` lets the thread sleep.
        """
        event: torch.Event = self.cuda.Event(blocking=True)
        event.record(self.cuda.current_stream(self.device))
        return event

    def follow(self, work: dist.Work | None) -> None:
        """Makes the current stream wait for a transfer, but not the host."""
        assert work is not None
        work.wait()

    def use_here(self, tensor: Tensor) -> Tensor:
        """Keeps the memory of another stream's tensor until the current stream is done with it."""
        tensor.record_stream(self.cuda.current_stream(self.device))
        return tensor

    def abort(self, group: ProcessGroup) -> None:
        """Ends all transfers of a group; their data are then invalid."""
        group.abort()


def gpu_of(device: torch.device) -> Gpu | None:
    """Returns the Gpu of a device; None for the CPU."""
    return Gpu(device) if device.type == "cuda" else None


def passed(event: torch.Event, seconds: float) -> bool:
    """Whether the GPU passes the event within that many seconds."""
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(_SLEEP_SECONDS)
    return True


class Pace:
    """Keeps the host at most one task ahead of its GPU.

    A host further ahead would choose tasks long before they run, ignoring messages that arrive in
    between.
    """

    def __init__(self, gpu: Gpu, failures: Failures) -> None:
        self._gpu, self._failures = gpu, failures
        self._under_way: deque[torch.Event] = deque()

    def end_task(self) -> None:
        """Marks the end of a task that the host has launched, and waits for the one before it.

        Raises PipelineError if another rank fails meanwhile, or if it takes too long.
        """
        self._under_way.append(self._gpu.mark())
        if len(self._under_way) > 1:
            self._wait_for(self._under_way.popleft())

    def finish(self) -> None:
        """Waits for everything that the host has launched. Raises PipelineError like `end_task`."""
        self._under_way.clear()
        self._wait_for(self._gpu.mark())

    def _wait_for(self, event: torch.Event) -> None:
        self._failures.wait(
            lambda seconds: passed(event, seconds), "the GPU did not finish a task", waits=2,
            idle=False,
        )  # fmt: skip
