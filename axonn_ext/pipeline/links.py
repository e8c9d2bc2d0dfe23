"""Sends messages to the neighbours of a stage and receives theirs, beside the computation.

Activations go from a stage to the next one, their gradients back. Each direction has connections of
its own, so that a message never waits for one of the other direction. In each, messages arrive in
the order in which they are sent. The form of a stage's messages is told with the first of them, and
must stay as it is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.grid import AxisGroup
from axonn_ext.pipeline.carriers import Carrier, Job, Key, Receiver, Sender, end_at_once
from axonn_ext.pipeline.failures import Failures, PipelineError
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import DIRECTIONS, Delay, Form, Message
from axonn_ext.pipeline.wires import (
    Channels,
    GlooIncoming,
    GlooOutgoing,
    SharedIncoming,
    SharedOutgoing,
    open_channels,
)
from axonn_ext.side_groups import SideGroups
from axonn_ext.tracing import record_message


class Links:
    """Sends to both neighbours of a stage and receives from them, each in a thread of its own.

    All ranks of a pipeline must make theirs in the same order. shares: whether ranks of one host
    send through shared memory. delay: for benchmarks and tests.
    """

    def __init__(
        self,
        stages: AxisGroup,
        inbox: Inbox,
        failures: Failures,
        groups: SideGroups,
        *,
        shares: bool = True,
        delay: Delay | None = None,
    ) -> None:
        self._stages, self._inbox, self._failures, self._delay = stages, inbox, failures, delay
        self._forms: dict[Key, Form] = {}  # of what this stage sends
        self.num_forgotten = 0
        self._channels: list[_C.MessageSender] = []
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}
        for direction in DIRECTIONS:
            self._connect(direction, groups, shares)
        for carrier in self._carriers:
            carrier.start()
        self._end = weakref.finalize(self, end_at_once, self._carriers, inbox)

    @property
    def _carriers(self) -> list[Carrier]:
        return [*self._senders.values(), *self._receivers.values()]

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that this rank's messages have taken so far, and keep."""
        return sum(channel.num_bytes for channel in self._channels)

    def expect(self, phase: str, messages: Iterable[Message]) -> None:
        """Says which messages will arrive from now on, for each direction in their order.

        phase: "training" or "evaluation", which may have messages of different shapes.
        """
        for message in messages:
            self._receivers[message.direction].add(Job(phase, message))

    def send(self, phase: str, message: Message, tensor: Tensor) -> None:
        """Sends without waiting. The tensor must not change until `wait_for_sends` returns.

        Raises PipelineError if it has another shape or dtype than those before it.
        """
        job = Job(phase, message, tensor, time.monotonic())
        form = Form.of(tensor)
        known = self._forms.setdefault(job.key, form)
        if known != form:
            raise PipelineError(
                f"{message} is {form}, but those before it were {known}: all micro-batches must be "
                "alike; before others come, call Pipeline.forget_shapes on all ranks"
            )
        if self._delay is not None:
            job.due += self._delay(message.direction, message.stage, message.micro_batch)
        record_message(f"pipeline {message.direction}", tensor, self._stages)
        self._senders[message.direction].add(job)

    def wait_for_sends(self) -> None:
        """Returns when all messages are sent. Raises PipelineError if one cannot be."""
        for direction, sender in self._senders.items():
            self._failures.wait(sender.has_done_all, f"messages {direction} were not sent", waits=2)
        self._inbox.check()

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
        for carrier in self._carriers:
            carrier.end()
        for carrier in self._carriers:
            carrier.join()
        self._let_go()

    def abandon(self) -> None:
        """Ends the threads after a failure, but those that wait for gloo."""
        self._end()
        self._let_go()

    def _let_go(self) -> None:
        """Frees the shared memory, but what tensors still use."""
        self._channels.clear()
        self._senders.clear()
        self._receivers.clear()

    def _connect(self, direction: str, groups: SideGroups, shares: bool) -> None:
        """Connects this stage with both neighbours."""
        stages, step = self._stages, DIRECTIONS[direction]
        up, down = (stages.rank + step) % stages.size, (stages.rank - step) % stages.size
        group = groups.get(f"messages {direction}", stages.process_group)
        channels = Channels({}, {}, False)
        if shares:
            channels = open_channels(f"messages {direction}", stages, to=[up], source=[down])
        self._channels += channels.senders.values()
        sender, receiver = channels.senders.get(up), channels.receivers.get(down)
        outgoing = GlooOutgoing(group, up) if sender is None else SharedOutgoing(sender)
        incoming = GlooIncoming(group, down) if receiver is None else SharedIncoming(receiver)
        to = dist.get_process_group_ranks(stages.process_group)[up]
        self._senders[direction] = Sender(outgoing, self._inbox, to=to)
        self._receivers[direction] = Receiver(incoming, self._inbox)
