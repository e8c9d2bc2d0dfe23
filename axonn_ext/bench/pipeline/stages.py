"""An emulated layer, whose time is a sleep, and messages that come late by random times.

With fewer cores than stages, stages that really compute would measure the cores and not the
schedule. A sleep leaves its core to others, so emulated stages run beside each other anywhere.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_ext.planner.pipeline_simulator import StageTimes
from axonn_ext.spec.pipeline import Task


class EmulatedLayer(nn.Module):
    """Returns what a small Linear makes of x, after as many seconds as a large one would take.

    Forward and the input gradient take `times.forward` and `times.backward`. The gradient of the
    weight takes `times.weight` at the moment when it is added: in backward, or later if a schedule
    defers it.
    """

    def __init__(self, linear: nn.Module, times: StageTimes) -> None:
        super().__init__()
        self.linear, self._times = linear, times
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        # A hook of the tensor, since torch's split backward adds to `grad` itself, without running
        # hooks for accumulated gradients.
        weight.register_hook(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y: Tensor = _Sleep.apply(self.linear(x), self._times.backward)
        time.sleep(max(0.0, began + self._times.forward - time.perf_counter()))
        return y

    def _weight(self, _: Tensor) -> None:
        time.sleep(self._times.weight)


class _Sleep(torch.autograd.Function):
    """The identity, whose backward takes so many seconds.

    It follows the Linear, so that it runs also where the input of the layer needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return dy, None


class Delays:
    """How late messages come: random seconds, the same for every schedule in a round.

    They are exponentially distributed. `draw` makes those of a round.
    """

    def __init__(self, micro_batches: int, virtual_stages: int, seed: int) -> None:
        self._shape = (2, virtual_stages, micro_batches)
        self._seed, self._seconds = seed, torch.zeros(self._shape).tolist()

    def draw(self, mean_s: float, round_number: int) -> None:
        """Makes the delays of a round, with so many seconds in the mean; none for a mean of 0."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + round_number + 1)
        drawn = torch.empty(self._shape, dtype=torch.float64).exponential_(generator=generator)
        self._seconds = (mean_s * drawn).tolist()

    def of_receiver(self, direction: str, stage: int, micro_batch: int) -> float:
        """Returns the delay of the message that a virtual stage gets."""
        seconds: float = self._seconds[direction == "backward"][stage][micro_batch]
        return seconds

    def of_sender(self, direction: str, stage: int, micro_batch: int) -> float:
        """Returns the delay of the message that a virtual stage sends, as the simulator asks."""
        receiver = stage + (1 if direction == "forward" else -1)
        return self.of_receiver(direction, receiver, micro_batch)


def peak_deferred(tasks: list[Task], *, defers: bool) -> int:
    """Returns of how many micro-batches weight gradients waited at once, given what ran."""
    waiting = most = 0
    for task in tasks:
        waiting += {"backward": defers, "weight": -1}.get(task.kind, 0)
        most = max(most, waiting)
    return most
