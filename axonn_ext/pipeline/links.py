"""Sends messages to the neighbours of a stage and receives theirs, beside the computation.

Activations go from a stage to the next one, their gradients back. Each direction has connections of
its own, so that a message never waits for one of the other direction. In each, messages arrive in
the order in which they are sent. The form of a stage's messages is told with the first of them, and
must stay as it is.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from axonn_ext import _C
from axonn_ext.grid import AxisGroup
from axonn_ext.pipeline.failures import Failures, PipelineError
from axonn_ext.pipeline.groups import make_group
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import DIRECTIONS, HEADER, Delay, Form, Message
from axonn_ext.pipeline.wires import (
    Channels,
    GlooIncoming,
    GlooOutgoing,
    Incoming,
    Outgoing,
    SharedIncoming,
    SharedOutgoing,
    open_channels,
)
from axonn_ext.tracing import record_message

_Key = tuple[str, str, int]  # phase, direction, stage


@dataclass
class _Job:
    """A message to send (tensor, when) or to receive."""

    phase: str
    message: Message
    tensor: Tensor | None = None
    due: float = 0.0

    @property
    def key(self) -> _Key:
        return self.phase, self.message.direction, self.message.stage


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
        *,
        shares: bool = True,
        delay: Delay | None = None,
    ) -> None:
        self._stages, self._inbox, self._failures, self._delay = stages, inbox, failures, delay
        self._unsent = ""  # why messages could not be sent
        self._forms: dict[_Key, Form] = {}  # of what this stage sends
        self._told: set[_Key] = set()  # whose form the neighbour knows
        self._received: dict[_Key, Form] = {}
        self._sends = {direction: queue.Queue[_Job | None]() for direction in DIRECTIONS}
        self._receives = {direction: queue.Queue[_Job | None]() for direction in DIRECTIONS}
        self._threads: list[threading.Thread] = []
        self._senders: list[_C.MessageSender] = []
        self._incoming: list[Incoming] = []
        for direction in DIRECTIONS:
            outgoing, incoming = self._connect(direction, shares)
            self._start(self._sends[direction], partial(self._send, outgoing))
            self._start(self._receives[direction], partial(self._receive, incoming))
            self._incoming.append(incoming)
        # No thread may wake up in C++ while the interpreter ends.
        weakref.finalize(self, _stop, self._incoming)

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that this rank's messages have taken so far, and keep."""
        return sum(sender.num_bytes for sender in self._senders)

    def expect(self, phase: str, messages: Iterable[Message]) -> None:
        """Says which messages will arrive from now on, for each direction in their order.

        phase: "training" or "evaluation", which may have messages of different shapes.
        """
        for message in messages:
            self._receives[message.direction].put(_Job(phase, message))

    def send(self, phase: str, message: Message, tensor: Tensor) -> None:
        """Sends without waiting. The tensor must not change until `wait_for_sends` returns.

        Raises PipelineError if it has another shape or dtype than those before it.
        """
        job = _Job(phase, message, tensor, time.monotonic())
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
        self._sends[message.direction].put(job)

    def wait_for_sends(self) -> None:
        """Returns when all messages are sent. Raises PipelineError if one cannot be."""
        for direction, sends in self._sends.items():
            self._failures.wait(
                partial(_is_empty, sends), f"messages {direction} were not sent", waits=2
            )
        if self._unsent:
            raise self._failures.error(self._unsent)

    def forget_shapes(self) -> None:
        """Lets the next messages have other shapes. All ranks call it between steps."""
        for known in (self._forms, self._told, self._received):
            known.clear()

    def close(self) -> None:
        """Ends the threads. All messages must have been received."""
        self._end_threads()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """Ends the threads after a failure, but those that wait for gloo."""
        self._end_threads()
        _stop(self._incoming)
        self._inbox.close()

    def _end_threads(self) -> None:
        for jobs in (*self._sends.values(), *self._receives.values()):
            jobs.put(None)

    def _connect(self, direction: str, shares: bool) -> tuple[Outgoing, Incoming]:
        """Connects this stage with both neighbours."""
        group = make_group(f"messages {direction}", self._stages)
        up = (self._stages.rank + DIRECTIONS[direction]) % self._stages.size
        down = (self._stages.rank - DIRECTIONS[direction]) % self._stages.size
        channels = Channels({}, {}, False)
        if shares:
            channels = open_channels(f"messages {direction}", group, to=[up], source=[down])
        self._senders += channels.senders.values()
        sender, receiver = channels.senders.get(up), channels.receivers.get(down)
        return (
            GlooOutgoing(group, up) if sender is None else SharedOutgoing(sender),
            GlooIncoming(group, down) if receiver is None else SharedIncoming(receiver),
        )

    def _start(self, jobs: queue.Queue[_Job | None], carry_out: Callable[[_Job], None]) -> None:
        def run() -> None:
            while (job := jobs.get()) is not None:
                try:
                    carry_out(job)
                finally:
                    job.tensor = None
                    del job
                    jobs.task_done()

        thread = threading.Thread(target=run, daemon=True, name="axonn pipeline")
        thread.start()
        self._threads.append(thread)

    def _send(self, outgoing: Outgoing, job: _Job) -> None:
        tensor = job.tensor
        assert tensor is not None
        if self._unsent:
            return
        time.sleep(max(0.0, job.due - time.monotonic()))
        try:
            if job.key not in self._told:
                self._told.add(job.key)
                outgoing.send(Form.of(tensor).header())
            outgoing.send(tensor)
        except Exception as error:  # the neighbour's process has ended, or the network
            self._unsent = f"{job.message} was not sent: {_short(error)}"

    def _receive(self, incoming: Incoming, job: _Job) -> None:
        self._inbox.wait_for_room(job.message.direction)
        try:
            if job.key not in self._received:
                header = incoming.receive(HEADER)
                if header is None:
                    return
                self._received[job.key] = Form.read(header)
            tensor = incoming.receive(self._received[job.key])
            if tensor is not None:
                self._inbox.put(job.message, tensor)
        except Exception as error:
            self._inbox.fail(job.message.direction, _short(error))


def _stop(incoming: Iterable[Incoming]) -> None:
    for each in incoming:
        each.stop()


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _is_empty(jobs: queue.Queue[_Job | None], seconds: float) -> bool:
    """Whether all jobs are done, now or within so many seconds."""
    with jobs.all_tasks_done:
        return jobs.all_tasks_done.wait_for(lambda: not jobs.unfinished_tasks, seconds)
