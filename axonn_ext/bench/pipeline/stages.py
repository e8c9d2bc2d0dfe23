"""An emulated layer, whose time is a sleep, and messages that come late by random times.

With fewer cores than stages, stages that really compute would measure the cores and not the
schedule. A sleep leaves its core to others, so emulated stages run beside each other anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_ext.spec.pipeline import Task
from axonn_ext.spec.pipeline_simulator import StageTimes


class Sleeper:
    """Sleeps for as long as work would take, over several sleeps exactly so.

    A sleep ends too late, by some tenths of a millisecond and by more on a busy machine. What was
    too much is taken from the next sleep.
    """

    def __init__(self) -> None:
        self._owed = 0.0

    def sleep(self, seconds: float, *, began: float | None = None) -> None:
        """Returns so many seconds after `began`, default now; both are of time.perf_counter()."""
        began = time.perf_counter() if began is None else began
        wanted = began + seconds - self._owed
        time.sleep(max(0.0, wanted - time.perf_counter()))
        self._owed = time.perf_counter() - wanted


class EmulatedLayer(nn.Module):
    """Returns what a small Linear makes of x, after as many seconds as a large one would take.

    Forward and the input gradient take `times.forward` and `times.backward`. The gradient of the
    weight takes `times.weight` at the moment when it is added: in backward, or later if a schedule
    defers it.
    """

    def __init__(self, linear: nn.Module, times: StageTimes, sleeper: Sleeper) -> None:
        super().__init__()
        self.linear, self._times, self._sleeper = linear, times, sleeper
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        # A hook of the tensor, since torch's split backward adds to `grad` itself, without running
        # hooks for accumulated gradients.
        weight.register_hook(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y: Tensor = _Sleep.apply(self.linear(x), self._sleeper, self._times.backward)
        self._sleeper.sleep(self._times.forward, began=began)
        return y

    def _weight(self, _: Tensor) -> None:
        self._sleeper.sleep(self._times.weight)


class _Sleep(torch.autograd.Function):
    """The identity, whose backward takes so many seconds.

    It follows the Linear, so that it runs also where the input of the layer needs no gradient. It
    returns a copy, since torch's pipelining detaches what a stage returns, which no view allows.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, sleeper: Sleeper, seconds: float) -> Tensor:
        ctx.sleeper, ctx.seconds = sleeper, seconds
        return y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleeper.sleep(ctx.seconds)
        return dy, None, None


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


def peaks(tasks: Iterable[Task], *, defers: bool) -> tuple[int, int]:
    """Returns the most micro-batches that wait for weight gradients, and that are held at all.

    Those in flight are held, too. tasks: what ran, in order.
    """
    in_flight = waiting = most_waiting = most_held = 0
    for task in tasks:
        in_flight += {"forward": 1, "backward": -1}.get(task.kind, 0)
        waiting += {"backward": int(defers), "weight": -1}.get(task.kind, 0)
        most_waiting = max(most_waiting, waiting)
        most_held = max(most_held, in_flight + waiting)
    return most_waiting, most_held
