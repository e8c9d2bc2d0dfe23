"""Threads that send and receive messages between GPUs. Nothing here has run on a GPU yet.

A message is announced over a connection of the CPU once its values are computed, and only then does
the receiver ask its GPU for it. So a GPU never waits for a message that may not come; waiting is
left to the host, which can give up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.pipeline.carriers import Job, Receiver, Sender
from axonn_ext.pipeline.edges import Edge
from axonn_ext.pipeline.gpu import Gpu
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import Form
from axonn_ext.pipeline.wires import Incoming, Outgoing

_ANNOUNCEMENT = Form((1,), torch.uint8)


class GpuSender(Sender):
    """Sends messages over an edge. `outgoing` is for their forms and announcements."""

    def __init__(self, edge: Edge, gpu: Gpu, outgoing: Outgoing, inbox: Inbox, *, to: int) -> None:
        super().__init__(outgoing, inbox, to=to)
        self._edge, self._gpu = edge, gpu
        self._announcement = torch.zeros(_ANNOUNCEMENT.shape, dtype=_ANNOUNCEMENT.dtype)

    def abort(self) -> None:
        self._edge.abort()

    def _run(self) -> None:
        self._gpu.cuda.set_device(self._gpu.device)  # which each thread has for itself
        super()._run()

    def _hand_over(self, job: Job) -> None:
        assert job.tensor is not None and job.ready is not None
        job.ready.synchronize()
        self._outgoing.send(self._announcement)
        self._edge.send(job.tensor)


class GpuReceiver(Receiver):
    """Receives messages over an edge. `incoming` is for their forms and announcements."""

    def __init__(self, edge: Edge, gpu: Gpu, incoming: Incoming, inbox: Inbox) -> None:
        super().__init__(incoming, inbox)
        self._edge, self._gpu = edge, gpu

    def abort(self) -> None:
        self._edge.abort()

    def _run(self) -> None:
        self._gpu.cuda.set_device(self._gpu.device)
        super()._run()

    def _fetch(self, form: Form) -> Tensor | None:
        announced = self._incoming.receive(_ANNOUNCEMENT)
        return None if announced is None else self._edge.receive(form)
