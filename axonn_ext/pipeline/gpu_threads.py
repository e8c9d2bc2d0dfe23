"""Threads that send and receive messages between GPUs.

A sending GPU waits for the receiving one, and vice versa, and while it waits it may hold up its
other work; a host that frees GPU memory waits, too. So neither starts a transfer before both are
ready, which their hosts settle with two messages:

    receiver                                     sender
    has room for a message, has memory for it
    "come"                                  ->   has it, and its values are computed
    starts its GPU                         <-    "it comes"; starts its GPU

All other waiting is left to the hosts, which can give up. The receiver says "come" as early as it
can, so a message that it has room for waits only for "it comes".
"""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.pipeline.channels import Incoming, Outgoing
from axonn_ext.pipeline.gpu import Gpu
from axonn_ext.pipeline.gpu_channels import GpuChannel
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import Form
from axonn_ext.pipeline.threads import Job, Receiver, Sender

_WORD = Form((1,), torch.uint8)  # only its arrival counts, not its value


class GpuSender(Sender):
    """Sends messages over a channel.

    outgoing: carries their forms and "it comes". calls: carries the receiver's "come" for each.
    """

    def __init__(
        self,
        channel: GpuChannel,
        gpu: Gpu,
        outgoing: Outgoing,
        calls: Incoming,
        inbox: Inbox,
        *,
        to: int,
    ) -> None:
        super().__init__(outgoing, inbox, to=to)
        self._channel, self._gpu, self._calls = channel, gpu, calls

    def stop(self) -> None:
        self._calls.stop()

    def abort(self) -> None:
        self._channel.abort()

    def _run(self) -> None:
        self._gpu.cuda.set_device(self._gpu.device)  # the current device is per thread
        super()._run()

    def _hand_over(self, job: Job) -> None:
        assert job.tensor is not None and job.ready is not None
        if self._calls.receive(_WORD) is None:
            return
        job.ready.synchronize()
        tensor = self._channel.laid_out(job.tensor)
        self._outgoing.send(_word())
        self._channel.send(tensor)


class GpuReceiver(Receiver):
    """Receives messages over a channel.

    incoming: carries their forms and "it comes". calls: carries this rank's "come" for each.
    """

    def __init__(
        self, channel: GpuChannel, gpu: Gpu, incoming: Incoming, calls: Outgoing, inbox: Inbox
    ) -> None:
        super().__init__(incoming, inbox)
        self._channel, self._gpu, self._calls = channel, gpu, calls

    def abort(self) -> None:
        self._channel.abort()

    def _run(self) -> None:
        self._gpu.cuda.set_device(self._gpu.device)
        super()._run()

    def _fetch(self, form: Form) -> Tensor | None:
        buffer = self._channel.buffer(form)
        self._calls.send(_word())
        if self._incoming.receive(_WORD) is None:
            return None
        self._channel.receive(buffer)
        return buffer


def _word() -> Tensor:
    return torch.zeros(_WORD.shape, dtype=_WORD.dtype)
