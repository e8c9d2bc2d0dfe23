"""Messages between GPUs, over NCCL. Not yet run on a GPU.

The threads of `Links` issue them, each on a stream of its own, and wait for their events, so that
the host knows what has arrived while the GPU computes.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.pipeline.messages import Form


class _Wire:
    def __init__(self, group: ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._stream = torch.cuda.Stream(device)

    def _finish(self, work: dist.Work | None) -> None:
        """Returns when the transfer is done, without waiting for anything else on the GPU."""
        assert work is not None
        work.wait()  # makes this wire's stream wait
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()


class NcclOutgoing(_Wire):
    """Sends to a rank's GPU."""

    def send(self, tensor: Tensor, ready: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            whole = tensor.to(self._device).contiguous()
            self._finish(dist.isend(whole, group=self._group, group_dst=self._peer))


class NcclIncoming(_Wire):
    """Receives from a rank's GPU."""

    def receive(self, form: Form) -> Tensor | None:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
            self._finish(dist.irecv(tensor, group=self._group, group_src=self._peer))
        return tensor

    def stop(self) -> None:
        """Does nothing: a receive of NCCL ends with the message or with the communicator."""


def event_after(tensor: Tensor) -> torch.cuda.Event | None:
    """Returns an event after which the tensor has its values; None on the CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def use_here(tensor: Tensor) -> Tensor:
    """Lets the current stream use a tensor that was received on another one."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class Pace:
    """Keeps the host one task ahead of the GPU at most.

    A host further ahead would choose tasks long before they run, without the messages that arrive
    until then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: deque[torch.cuda.Event] = deque()

    def launched(self) -> None:
        """Notes a task whose kernels have been launched; waits for the one before it."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        self._under_way.append(done)
        if len(self._under_way) > 1:
            self._under_way.popleft().synchronize()
