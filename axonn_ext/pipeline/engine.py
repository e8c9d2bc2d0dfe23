"""Runs the tasks of one stage for the micro-batches of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from axonn_ext.nn.deferred import DeferredWeightGradients, WeightGradients
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import BACKWARD, FORWARD, Message
from axonn_ext.pipeline.models import StagedModel
from axonn_ext.pipeline.neighbours import Neighbours
from axonn_ext.spec.pipeline import Task

TRAINING, EVALUATION = "training", "evaluation"
_Place = tuple[int, int]  # virtual stage, micro-batch


@dataclass
class _Forward:
    """The state that a forward leaves for its backward.

    x: the stage's input; None for the first stage. root: where backward begins; None if no
    parameter before it needs a gradient.
    """

    x: Tensor | None
    root: Tensor | GradientEdge | None
    weights: WeightGradients | None


@dataclass(frozen=True, slots=True)
class TaskRun:
    """When a task ran, in seconds of time.monotonic(), without its wait for a message.

    On a GPU, when the host launched it.
    """

    task: Task
    began: float
    ended: float


@dataclass
class StepStats:
    """Statistics of a step on this rank.

    peak_in_flight        the most micro-batches whose activations were held at a time
    peak_deferred_bytes   the most bytes held for deferred weight gradients at a time
    decisions             how often the stage's leader told others the next task
    decision_seconds      how long that took on the leader
    waited_seconds        how long the stage had nothing to do; on a GPU, how long its host waited
                          for others, while the GPU may have run work launched before
    shared_bytes          shared memory taken so far by messages to ranks of the same host
    tasks                 the tasks with their times, in order
    """

    peak_in_flight: int = 0
    peak_deferred_bytes: int = 0
    decisions: int = 0
    decision_seconds: float = 0.0
    waited_seconds: float = 0.0
    shared_bytes: int = 0
    tasks: list[TaskRun] = field(default_factory=list)


class StepRun:
    """The state of one step on this rank."""

    def __init__(
        self,
        model: StagedModel,
        *,
        phase: str,
        rank: int,
        inbox: Inbox,
        neighbours: Neighbours | None,
        deferring: DeferredWeightGradients | None,
        most_deferred: int | None,
        deferred_bytes: int,
        no_sync: Callable[[], AbstractContextManager[None]] | None,
        after_task: Sequence[Callable[[], None]],
        loss_scale: float,
    ) -> None:
        self._model, self._phase = model, phase
        self.micro_batches: Sequence[Any] = ()
        self._own = model.stages.on(rank)
        self._last = model.stages.num_virtual - 1
        self._inbox, self._neighbours = inbox, neighbours
        self._deferring, self._most_deferred = deferring, most_deferred
        self._most_deferred_bytes = deferred_bytes
        self._no_sync, self._after_task = no_sync, after_task
        self._loss_scale = loss_scale
        self._held: dict[_Place, _Forward] = {}
        self._weights: dict[_Place, WeightGradients] = {}
        self._deferred_bytes = 0  # of _weights
        self._losses: dict[int, Tensor] = {}
        self.stats = StepStats()
        self.now = "the start of the step"  # the rank's current activity, for messages

    def run(self, tasks: Iterable[Task]) -> None:
        """Runs the tasks of this rank in order."""
        carry_out = {FORWARD: self._forward, BACKWARD: self._backward, "weight": self._weight}
        for task in tasks:
            stage = self._own[task.chunk]
            self.now = f"stage {stage}, {task.kind} of micro-batch {task.micro_batch}"
            came, waited = time.monotonic(), self._inbox.waited_seconds
            carry_out[task.kind](stage, task.micro_batch)
            for end in self._after_task:
                end()
            began = came + self._inbox.waited_seconds - waited  # a task waits before it computes
            self.stats.tasks.append(TaskRun(task, began, time.monotonic()))

    def loss(self, device: torch.device) -> Tensor:
        """Returns the sum of the last stage's losses, in the order of micro-batches."""
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=device)
        losses = [self._losses[number] for number in sorted(self._losses)]
        return torch.stack(losses).double().sum()

    def must_run(self) -> bool:
        """Whether the deferred weight gradients have reached their limit in number or bytes."""
        if self._most_deferred is None:
            return self._deferred_bytes >= self._most_deferred_bytes
        return len(self._weights) >= self._most_deferred

    def _forward(self, stage: int, number: int) -> None:
        batch, trains = self.micro_batches[number], self._phase == TRAINING
        x = None
        if stage > 0:
            x = self._inbox.take(Message(FORWARD, stage, number))
            x = self._model.unpack(x, batch).requires_grad_(trains)
        collecting = self._deferring.collecting() if self._deferring and trains else nullcontext()
        with collecting as weights:
            y = self._model.run(stage, x, batch)
        self._check_output(stage, y)
        if stage == self._last:
            self._losses[number] = y.detach()
        else:
            sent = self._model.pack(y.detach(), batch)
            self._send(Message(FORWARD, stage + 1, number), sent)
        if trains:
            root = None
            if y.requires_grad:
                root = y if stage == self._last else get_gradient_edge(y)
            self._held[stage, number] = _Forward(x, root, weights)
            self.stats.peak_in_flight = max(self.stats.peak_in_flight, len(self._held))

    def _backward(self, stage: int, number: int) -> None:
        batch = self.micro_batches[number]
        forward = self._held.pop((stage, number))
        dy = None
        if stage == self._last:
            if forward.root is not None:
                assert isinstance(forward.root, Tensor)
                dy = torch.full_like(forward.root, self._loss_scale)
        else:
            dy = self._inbox.take(Message(BACKWARD, stage, number))
            dy = self._model.unpack(dy, batch)
        last = number == len(self.micro_batches) - 1 and self._deferring is None
        with nullcontext() if self._no_sync is None or last else self._no_sync():
            if forward.root is not None:
                torch.autograd.backward((forward.root,), (dy,))  # type: ignore[arg-type]
        if forward.x is not None:
            dx = forward.x.grad
            dx = torch.zeros_like(forward.x) if dx is None else dx
            sent = self._model.pack(dx, batch)
            self._send(Message(BACKWARD, stage - 1, number), sent)
        if forward.weights is not None and forward.root is not None:
            self._weights[stage, number] = forward.weights
            self._deferred_bytes += forward.weights.num_bytes
            peak = max(self.stats.peak_deferred_bytes, self._deferred_bytes)
            self.stats.peak_deferred_bytes = peak

    def _check_output(self, stage: int, y: object) -> None:
        if not isinstance(y, Tensor):
            raise TypeError(f"stage {stage} must return a tensor, got {type(y).__name__}")
        if stage == self._last and y.numel() != 1:
            raise ValueError(f"the loss must be one number, got a tensor of {list(y.shape)}")
        if stage == self._last and self._loss_scale > torch.finfo(y.dtype).max:
            raise ValueError(
                f"loss_scale={self._loss_scale:g} is more than a loss in {y.dtype} can hold; "
                "compute the loss in float32"
            )

    def _send(self, message: Message, tensor: Tensor) -> None:
        assert self._neighbours is not None
        self._neighbours.send(self._phase, message, tensor)

    def _weight(self, stage: int, number: int) -> None:
        weights = self._weights.pop((stage, number), None)
        if weights is None:  # no parameter of the stage needs a gradient
            return
        self._deferred_bytes -= weights.num_bytes
        last = number == len(self.micro_batches) - 1
        with nullcontext() if self._no_sync is None or last else self._no_sync():
            weights.run()
