"""The messages that have arrived on a stage, and how the stage waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.gpu import Gpu
from axonn_ext.pipeline.messages import DIRECTIONS, Message
from axonn_ext.ranks.grid import AxisGroup

_NOTED_AFTER_SECONDS = 0.1
ROOM = 4  # the most messages per direction that have arrived or are about to


class Inbox:
    """The messages that have arrived and are not used yet."""

    def __init__(self, stages: AxisGroup, failures: Failures, gpu: Gpu | None = None) -> None:
        self._stages, self._failures, self._gpu = stages, failures, gpu
        self._ranks = dist.get_process_group_ranks(stages.process_group)
        self._changed = threading.Condition()
        self._arrived: dict[Message, Tensor] = {}
        self._broken: dict[str, str] = {}  # direction -> why nothing more arrives
        self._room = dict.fromkeys(DIRECTIONS, ROOM)  # how many more may arrive
        self._is_closed = False
        self._gave_up = ""  # why waiting is pointless

    @property
    def waited_seconds(self) -> float:
        """The seconds for which this rank has waited for messages, decisions and sums so far."""
        return self._failures.waited_seconds

    def wait_for_room(self, direction: str) -> None:
        """Waits, in a thread that receives, until another message may arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._room[direction] > 0)
            self._room[direction] -= 1

    def close(self) -> None:
        """Ends all waiting for room."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def put(self, message: Message, tensor: Tensor) -> None:
        with self._changed:
            self._arrived[message] = tensor
            self._changed.notify_all()

    def fail(self, direction: str, why: str) -> None:
        """Ends all waiting for messages of the direction."""
        with self._changed:
            self._broken[direction] = why
            self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Ends all waiting: after some failure, no message will come."""
        with self._changed:
            self._gave_up = self._gave_up or why
            self._changed.notify_all()

    def check(self) -> None:
        """Raises PipelineError if waiting is pointless."""
        if self._gave_up:
            raise self._failures.error(self._gave_up)

    def has(self, message: Message) -> bool:
        """Whether the message has arrived, so that `take` returns at once."""
        with self._changed:
            return message in self._arrived

    def take(self, message: Message) -> Tensor:
        """Returns a message when it is there. Raises PipelineError if it does not come."""
        self.wait_for_any([message])
        with self._changed:
            self._room[message.direction] += 1
            self._changed.notify_all()
            tensor = self._arrived.pop(message)
        return tensor if self._gpu is None else self._gpu.use_here(tensor)

    def wait_for_any(self, messages: Sequence[Message]) -> None:
        """Waits until one of them is there. Raises PipelineError if none comes."""
        began = time.monotonic()
        is_there = self._wait(messages, _NOTED_AFTER_SECONDS)
        self._failures.waited_seconds += time.monotonic() - began
        if not is_there:
            with self._noted(messages[0]):
                self._failures.wait(
                    lambda seconds: self._wait(messages, seconds), self._missing(messages),
                    peer=self._ranks[self._sender(messages[0])],
                )  # fmt: skip

    def _wait(self, messages: Sequence[Message], seconds: float) -> bool:
        def ready() -> bool:
            return bool(self._gave_up) or any(
                m in self._arrived or m.direction in self._broken for m in messages
            )

        with self._changed:
            return self._changed.wait_for(ready, seconds) and self._look(messages)

    def _look(self, messages: Sequence[Message]) -> bool:
        """Whether a message is there. Raises PipelineError if none can come any more."""
        if any(message in self._arrived for message in messages):
            return True
        self.check()
        message = next(m for m in messages if m.direction in self._broken)
        raise self._failures.error(f"{self._missing([message])}: {self._broken[message.direction]}")

    def _missing(self, messages: Sequence[Message]) -> str:
        first, *others = messages
        also = "".join(f", nor did {other}" for other in others)
        return f"{first} did not come from rank {self._ranks[self._sender(first)]}{also}"

    def _sender(self, message: Message) -> int:
        """Returns the pipe coordinate of the stage that sends the message."""
        return (self._stages.rank - DIRECTIONS[message.direction]) % self._stages.size

    def _noted(self, message: Message) -> _C.noted_wait:
        return _C.noted_wait(
            group=f"pipeline/{self._stages.name}", axis="pipe", call=str(message),
            number=message.micro_batch + 1, peers=[self._sender(message)],
            what="may not have sent it", seconds=_NOTED_AFTER_SECONDS,
        )  # fmt: skip
