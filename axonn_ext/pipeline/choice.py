"""Chooses the next task of a stage: in a fixed order, or by which message has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext import _C
from axonn_ext.pipeline.channels import Channels, open_channels
from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import BACKWARD, FORWARD, Message
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.pipeline import Task

WEIGHT = "weight"
KINDS = (FORWARD, BACKWARD, WEIGHT)
_DECISION = "the decision about the stage's next task"


class Deferred(Protocol):
    """The weight gradients that a stage has deferred."""

    def must_run(self) -> bool:
        """Whether weight gradients must be computed before another backward may defer more."""


class Leader:
    """Lets one rank of a stage decide for all ranks of x, y and z, which must run the same tasks.

    A decision is one byte for each of the others, sent through shared memory if all of them are on
    one host (and `shares` is true), else broadcast over gloo.
    """

    def __init__(self, grid: Grid, failures: Failures, *, shares: bool = True) -> None:
        self._failures, model = failures, grid.model_group
        self._group: ProcessGroup | None = None
        if model.size > 1:
            ranks = dist.get_process_group_ranks(model.process_group)
            self._group = grid.side_groups.get("decisions", ranks)
        self.is_leader = model.rank == 0
        self.num_decisions, self.seconds = 0, 0.0  # seconds: of telling, on the leader
        self._channels = Channels({}, {}, False)
        if self._group is not None and shares:
            others = range(1, model.size)
            self._channels = open_channels(
                "decisions", model,
                to=others if self.is_leader else (), source=() if self.is_leader else (0,),
            )  # fmt: skip

    def decide(self, choose: Callable[[], str]) -> str:
        """Returns the leader's result of `choose`. Raises PipelineError if the leader failed."""
        if self._group is None:
            return choose()
        self.num_decisions += 1
        word = torch.tensor([KINDS.index(choose()) if self.is_leader else 0], dtype=torch.uint8)
        began = time.monotonic()
        if self._channels.everywhere:
            word = self._tell(word)
        else:
            work = dist.broadcast(word, group=self._group, group_src=0, async_op=True)
            self._failures.wait_for(work, _DECISION)
        self.seconds += time.monotonic() - began if self.is_leader else 0.0
        return KINDS[int(word.item())]

    def _tell(self, word: Tensor) -> Tensor:
        """Returns the leader's word; the leader does not wait for its receipt."""
        for sender in self._channels.senders.values():
            sender.send(word)
        return word if self.is_leader else self._hear(*self._channels.receivers.values())

    def _hear(self, receiver: _C.MessageReceiver) -> Tensor:
        heard: list[Tensor] = []

        def hears(seconds: float) -> bool:
            try:
                word = receiver.receive(seconds=seconds)
            except RuntimeError as error:
                raise self._failures.error(f"{_DECISION}: {error}") from None
            heard.extend([] if word is None else [word])
            return bool(heard)

        # The leader may itself be waiting for a message; its error, which says more, comes first.
        self._failures.wait(hears, f"{_DECISION} did not come", waits=2)
        return heard[0]


class MessageDriven:
    """Tasks in order of message arrival: a backward before a forward before a weight gradient.

    in_flight: the most micro-batches whose forward has run here but whose backward has not.
    """

    def __init__(
        self,
        *,
        stage: int,
        stages: int,
        micro_batches: int,
        in_flight: int,
        inbox: Inbox,
        leader: Leader,
        deferred: Deferred | None,
    ) -> None:
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        self._stage, self._micro_batches, self._in_flight = stage, micro_batches, in_flight
        self._inbox, self._leader, self._deferred = inbox, leader, deferred
        self._done = dict.fromkeys(KINDS, 0)

    def __iter__(self) -> Iterator[Task]:
        """Yields tasks. Each must have run before the next one is requested."""
        done, total = self._done, self._micro_batches
        while min(done[FORWARD], done[BACKWARD]) < total or self._has_weights():
            kind = self._next()
            yield Task(kind, 0, done[kind])
            done[kind] += 1

    def _has_weights(self) -> bool:
        return self._deferred is not None and self._done[WEIGHT] < self._done[BACKWARD]

    def _next(self) -> str:
        """Returns the kind of the next task. If only one is possible, no decision is needed."""
        done = self._done
        flying = done[FORWARD] - done[BACKWARD]
        may = []
        if flying:
            full = self._deferred is not None and self._has_weights() and self._deferred.must_run()
            if full:
                return WEIGHT
            if self._is_last:
                return BACKWARD
            may.append(BACKWARD)
        if done[FORWARD] < self._micro_batches and flying < self._in_flight:
            may.append(FORWARD)
        if self._has_weights():
            may.append(WEIGHT)
        return may[0] if len(may) == 1 else self._leader.decide(lambda: self._arrived(may))

    def _arrived(self, may: list[str]) -> str:
        messages = [Message(kind, self._stage, self._done[kind]) for kind in may if kind != WEIGHT]
        while True:
            for message in messages:
                if self._inbox.has(message) or (self._is_first and message.direction == FORWARD):
                    return message.direction
            if WEIGHT in may:
                return WEIGHT
            self._inbox.wait_for_any(messages)
