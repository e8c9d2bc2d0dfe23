"""Sends messages to the neighbours of a stage and receives theirs, beside the computation.

Activations go from a stage to the next one, their gradients back. Each direction has a c10d group
of its own, so that a message never waits for one of the other direction. In each, messages arrive
in the order in which they are sent. The form of a stage's messages is told with the first of them,
and must stay as it is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.grid import AxisGroup
from axonn_ext.pipeline.failures import PipelineError
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import DIRECTIONS, HEADER_SIZE, Delay, Form, Message

# Threads wait as long as it takes: the stage itself knows how long it has waited for a message.
# (gloo counts milliseconds in 32 bits.)
_PATIENCE = timedelta(days=1)
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

    All ranks of a pipeline must make theirs in the same order. delay: for benchmarks and tests.
    """

    def __init__(self, stages: AxisGroup, inbox: Inbox, *, delay: Delay | None = None) -> None:
        self._stages, self._inbox, self._delay = stages, inbox, delay
        self._forms: dict[_Key, Form] = {}  # of what this stage sends
        self._told: set[_Key] = set()  # whose form the neighbour knows
        self._received: dict[_Key, Form] = {}
        self._sends = {direction: queue.Queue[_Job | None]() for direction in DIRECTIONS}
        self._receives = {direction: queue.Queue[_Job | None]() for direction in DIRECTIONS}
        self._threads: list[threading.Thread] = []
        ranks = dist.get_process_group_ranks(stages.process_group)
        for direction in DIRECTIONS:
            group = dist.new_group(
                ranks, use_local_synchronization=True, timeout=_PATIENCE, backend="gloo",
                group_desc=f"messages {direction} (ranks {', '.join(map(str, ranks))})",
            )  # fmt: skip
            self._start(self._send, self._sends[direction], direction, group)
            self._start(self._receive, self._receives[direction], direction, group)

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
        job = _Job(phase, message, tensor.contiguous(), time.monotonic())
        form = Form.of(tensor)
        known = self._forms.setdefault(job.key, form)
        if known != form:
            raise PipelineError(
                f"{message} is {form}, but those before it were {known}: all micro-batches must be "
                "alike; before others come, call Pipeline.forget_shapes on all ranks"
            )
        if self._delay is not None:
            job.due += self._delay(message.direction, message.stage, message.micro_batch)
        self._sends[message.direction].put(job)

    def wait_for_sends(self) -> None:
        """Returns when all messages are sent. Raises PipelineError if one cannot be."""
        for sends in self._sends.values():
            sends.join()
        self._inbox.check()

    def forget_shapes(self) -> None:
        """Lets the next messages have other shapes. All ranks call it between steps."""
        for known in (self._forms, self._told, self._received):
            known.clear()

    def close(self) -> None:
        """Ends the threads. All messages must have been sent and received."""
        for jobs in (*self._sends.values(), *self._receives.values()):
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _start(
        self,
        carry_out: Callable[[_Job, ProcessGroup, int], None],
        jobs: queue.Queue[_Job | None],
        direction: str,
        group: ProcessGroup,
    ) -> None:
        sign = 1 if carry_out == self._send else -1
        peer = (self._stages.rank + sign * DIRECTIONS[direction]) % self._stages.size

        def run() -> None:
            broken = False
            while (job := jobs.get()) is not None:
                try:
                    if not broken:
                        carry_out(job, group, peer)
                except RuntimeError as error:  # the neighbour's process has ended, or the network
                    broken = True
                    self._inbox.fail(direction, str(error).partition("\n")[0])
                finally:
                    job.tensor = None
                    jobs.task_done()
                del job

        thread = threading.Thread(target=run, daemon=True, name=f"axonn pipeline {direction}")
        thread.start()
        self._threads.append(thread)

    def _send(self, job: _Job, group: ProcessGroup, peer: int) -> None:
        tensor = job.tensor
        assert tensor is not None
        time.sleep(max(0.0, job.due - time.monotonic()))
        if job.key not in self._told:
            self._told.add(job.key)
            _wait(dist.isend(Form.of(tensor).header(), group=group, group_dst=peer))
        _wait(dist.isend(tensor, group=group, group_dst=peer))

    def _receive(self, job: _Job, group: ProcessGroup, peer: int) -> None:
        if job.key not in self._received:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64)
            _wait(dist.irecv(header, group=group, group_src=peer))
            self._received[job.key] = Form.read(header)
        form = self._received[job.key]
        tensor = torch.empty(form.shape, dtype=form.dtype)
        _wait(dist.irecv(tensor, group=group, group_src=peer))
        self._inbox.put(job.message, tensor)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(_PATIENCE)
