"""Sends messages to the neighbours of a stage and receives theirs, concurrently with computation.

Activations go from a stage to the next one, their gradients back. Each direction has its own
connections, so that a message never waits for one of the other direction. In each, messages arrive
in the order in which they are sent. The form of a stage's messages is sent with the first of them,
and must not change.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext import _C
from axonn_ext.pipeline.channels import (
    Channels,
    GlooIncoming,
    GlooOutgoing,
    Incoming,
    Outgoing,
    SharedIncoming,
    SharedOutgoing,
    open_channels,
)
from axonn_ext.pipeline.failures import Failures, PipelineError
from axonn_ext.pipeline.gpu import Gpu
from axonn_ext.pipeline.gpu_channels import GpuChannel, connect
from axonn_ext.pipeline.gpu_threads import GpuReceiver, GpuSender
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import DIRECTIONS, Delay, Form, Message
from axonn_ext.pipeline.threads import Job, Key, MessageThread, Receiver, Sender, end_at_once
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.side_groups import SideGroups
from axonn_ext.ranks.tracing import record_issued


@dataclass(frozen=True)
class _Ways:
    """A way to one stage, and a way from another."""

    out: Outgoing
    into: Incoming


class Neighbours:
    """Sends to both neighbours of a stage and receives from them, each in a separate thread.

    All ranks of a pipeline must make their instances in the same order. gpu: where messages are;
    None: on the CPU. wraps: whether the last stage sends to the first one; only used on GPUs.
    shares: whether ranks of one host send through shared memory. delay: for benchmarks and tests.

    Raises PipelineError or RuntimeError if GPUs cannot be connected.
    """

    def __init__(
        self,
        stages: AxisGroup,
        inbox: Inbox,
        failures: Failures,
        groups: SideGroups,
        *,
        gpu: Gpu | None = None,
        wraps: bool = True,
        shares: bool = True,
        delay: Delay | None = None,
    ) -> None:
        self._stages, self._inbox, self._failures, self._delay = stages, inbox, failures, delay
        self._gpu = gpu
        self._gpu_channels: Mapping[tuple[str, int], GpuChannel] = {}
        if gpu is not None:
            self._gpu_channels = connect(stages, groups, gpu, failures, wraps=wraps)
        self._forms: dict[Key, Form] = {}  # of the messages that this stage sends
        self.num_forgotten = 0
        self._channels: list[_C.MessageSender] = []
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}
        for direction in DIRECTIONS:
            self._connect(direction, groups, shares)
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, end_at_once, self._threads, inbox)

    @property
    def _threads(self) -> list[MessageThread]:
        return [*self._senders.values(), *self._receivers.values()]

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that this rank's messages have taken so far and still hold."""
        return sum(channel.num_bytes for channel in self._channels)

    def expect(self, phase: str, messages: Iterable[Message]) -> None:
        """Announces the messages that will arrive from now on, in order for each direction.

        phase: "training" or "evaluation", which may have messages of different shapes.
        """
        for message in messages:
            self._receivers[message.direction].add(Job(phase, message))

    def send(self, phase: str, message: Message, tensor: Tensor) -> None:
        """Sends without waiting. The tensor must not change until `wait_for_sends` returns.

        On a GPU the current stream is the one that computes it.

        Raises PipelineError if its shape or dtype differs from those before it.
        """
        ready = None if self._gpu is None else self._gpu.mark()
        job = Job(phase, message, tensor, ready, time.monotonic())
        form = Form.of(tensor)
        known = self._forms.setdefault(job.key, form)
        if known != form:
            raise PipelineError(
                f"{message} is {form}, but those before it were {known}: all micro-batches must "
                "have one shape; to change it, call Pipeline.forget_shapes on all ranks first"
            )
        if self._delay is not None:
            job.due += self._delay(message.direction, message.stage, message.micro_batch)
        record_issued("send", f"pipeline {message.direction}", tensor, self._stages)
        self._senders[message.direction].add(job)

    def wait_for_sends(self) -> None:
        """Returns when all messages are sent. Raises PipelineError if one cannot be."""
        for sender in self._senders.values():
            self._failures.wait(partial(self._has_sent, sender), sender.unsent, waits=2)
        self._inbox.check()

    def _has_sent(self, sender: Sender, seconds: float) -> bool:
        self._inbox.check()  # the other direction may have failed
        return sender.has_done_all(seconds)

    def forget_shapes(self) -> None:
        """Lets the next messages have other shapes. All ranks call it between steps."""
        self.num_forgotten += 1
        self._forms.clear()
        for sender in self._senders.values():
            sender.told.clear()
        for receiver in self._receivers.values():
            receiver.forms.clear()

    def close(self) -> None:
        """Ends the threads. All messages must have been received."""
        self._end.detach()
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join()
        self._let_go()

    def abandon(self) -> None:
        """Ends the threads after a failure, except those that wait for gloo."""
        self._end()
        self._let_go()

    def _let_go(self) -> None:
        """Frees the shared memory, except what tensors still use."""
        self._channels.clear()
        self._senders.clear()
        self._receivers.clear()

    def _connect(self, direction: str, groups: SideGroups, shares: bool) -> None:
        """Connects this stage with both neighbours."""
        stages, step = self._stages, DIRECTIONS[direction]
        up, down = (stages.rank + step) % stages.size, (stages.rank - step) % stages.size
        ranks = dist.get_process_group_ranks(stages.process_group)
        group = groups.get(f"messages {direction}", ranks)
        ways = self._ways(f"messages {direction}", group, shares, to=up, source=down)
        gpu, inbox = self._gpu, self._inbox
        sender, receiver = Sender(ways.out, inbox, to=ranks[up]), Receiver(ways.into, inbox)
        if gpu is not None:  # the receiver calls for each message, in the opposite direction
            calls = self._ways(f"calls {direction}", group, shares, to=down, source=up, tag=1)
            if channel := self._gpu_channels.get((direction, stages.rank)):
                sender = GpuSender(channel, gpu, ways.out, calls.into, inbox, to=ranks[up])
            if channel := self._gpu_channels.get((direction, down)):
                receiver = GpuReceiver(channel, gpu, ways.into, calls.out, inbox)
        self._senders[direction], self._receivers[direction] = sender, receiver

    def _ways(
        self, name: str, group: ProcessGroup, shares: bool, *, to: int, source: int, tag: int = 0
    ) -> _Ways:
        """Returns a way to one stage and one from another: through shared memory, else gloo."""
        channels = Channels({}, {}, False)
        if shares:
            channels = open_channels(name, self._stages, to=[to], source=[source])
        self._channels += channels.senders.values()
        sender, receiver = channels.senders.get(to), channels.receivers.get(source)
        return _Ways(
            GlooOutgoing(group, to, tag) if sender is None else SharedOutgoing(sender),
            GlooIncoming(group, source, tag) if receiver is None else SharedIncoming(receiver),
        )
