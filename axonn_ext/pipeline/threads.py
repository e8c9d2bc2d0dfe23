"""Threads that send the messages of one direction to a neighbour, or receive them from one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.pipeline.channels import Incoming, Outgoing
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import HEADER, Form, Message

Key = tuple[str, str, int]  # phase, direction, stage: all messages of a key have one form
_JOIN_SECONDS = 1.0


@dataclass
class Job:
    """A message to send (tensor, due) or to receive.

    ready: on a GPU, the event after which the tensor to send has its values.
    """

    phase: str
    message: Message
    tensor: Tensor | None = None
    ready: torch.Event | None = None
    due: float = 0.0

    @property
    def key(self) -> Key:
        return self.phase, self.message.direction, self.message.stage


class MessageThread:
    """Does jobs one after another, in a separate thread."""

    def __init__(self) -> None:
        self._jobs = queue.Queue[Job | None]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="axonn pipeline")

    def start(self) -> None:
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def has_done_all(self, seconds: float) -> bool:
        """Whether all jobs are done, now or within that many seconds."""
        jobs = self._jobs
        with jobs.all_tasks_done:
            return jobs.all_tasks_done.wait_for(lambda: not jobs.unfinished_tasks, seconds)

    def end(self) -> None:
        """Ends the thread after its current jobs."""
        self._jobs.put(None)

    def stop(self) -> None:
        """Ends a job's wait, where that is possible."""

    def abort(self) -> None:
        """Ends a transfer between GPUs, if there is one."""

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._pass_on(job)
            finally:
                job.tensor = None
                del job
                self._jobs.task_done()

    def _pass_on(self, job: Job) -> None:
        raise NotImplementedError


class Sender(MessageThread):
    """Sends messages to a rank. If one cannot be sent, all waiting for other messages ends."""

    def __init__(self, outgoing: Outgoing, inbox: Inbox, *, to: int) -> None:
        super().__init__()
        self._outgoing, self._inbox, self._to = outgoing, inbox, to
        self.told: set[Key] = set()  # the keys whose form the neighbour knows
        self._now: Message | None = None
        self._has_failed = False

    def unsent(self) -> str:
        """Returns a description of the message being sent, for errors if it cannot be."""
        return f"{self._now or 'a message'} was not sent to rank {self._to}"

    def _pass_on(self, job: Job) -> None:
        tensor, self._now = job.tensor, job.message
        assert tensor is not None
        if self._has_failed:
            return
        time.sleep(max(0.0, job.due - time.monotonic()))
        try:
            if job.key not in self.told:
                self.told.add(job.key)
                self._outgoing.send(Form.of(tensor).header())
            self._hand_over(job)
        except Exception as error:  # no memory, the neighbour's process has ended, or the network
            self._has_failed = True
            self._inbox.give_up(f"{self.unsent()}: {_short(error)}")

    def _hand_over(self, job: Job) -> None:
        assert job.tensor is not None
        self._outgoing.send(job.tensor)


class Receiver(MessageThread):
    """Receives messages."""

    def __init__(self, incoming: Incoming, inbox: Inbox) -> None:
        super().__init__()
        self._incoming, self._inbox = incoming, inbox
        self.forms: dict[Key, Form] = {}

    def stop(self) -> None:
        self._incoming.stop()

    def _pass_on(self, job: Job) -> None:
        self._inbox.wait_for_room(job.message.direction)
        try:
            if job.key not in self.forms:
                header = self._incoming.receive(HEADER)
                if header is None:
                    return
                self.forms[job.key] = Form.read(header)
            tensor = self._fetch(self.forms[job.key])
            if tensor is not None:
                self._inbox.put(job.message, tensor)
        except Exception as error:
            self._inbox.fail(job.message.direction, _short(error))

    def _fetch(self, form: Form) -> Tensor | None:
        return self._incoming.receive(form)


def end_at_once(threads: Iterable[MessageThread], inbox: Inbox) -> None:
    """Ends the threads, except those that wait for gloo.

    A thread that wakes up in C++ while the interpreter ends would kill the process with SIGABRT.
    """
    inbox.close()
    for thread in threads:
        thread.end()
        thread.stop()
    for thread in threads:
        thread.join(_JOIN_SECONDS)
    for thread in threads:
        if thread.is_alive():
            thread.abort()
            thread.join(_JOIN_SECONDS)


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0]
