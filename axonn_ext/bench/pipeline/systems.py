"""Our pipeline on emulated stages, with messages that are late by random times.

With fewer cores than stages, stages that really compute would measure the cores and not the
schedule. A sleep leaves its core to others, so emulated stages run in parallel anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_ext.bench.pipeline.plan import FEATURES, LAYERS_PER_STAGE, ROWS, CaseSpec, Plan
from axonn_ext.nn import Linear
from axonn_ext.pipeline import Pipeline
from axonn_ext.pipeline.engine import TaskRun
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.pipeline import Task
from axonn_ext.spec.pipeline_simulator import StageTimes


class Sleeper:
    """Sleeps for as long as work would take, exactly so over several sleeps.

    A sleep ends too late, by some tenths of a millisecond and by more on a busy machine. The excess
    is subtracted from the next sleep.
    """

    def __init__(self) -> None:
        self._owed = 0.0

    def sleep(self, seconds: float, *, began: float | None = None) -> None:
        """Returns `seconds` after `began`, by default now, a time of time.perf_counter()."""
        began = time.perf_counter() if began is None else began
        wanted = began + seconds - self._owed
        time.sleep(max(0.0, wanted - time.perf_counter()))
        self._owed = time.perf_counter() - wanted


class EmulatedLayer(nn.Module):
    """Returns the result of a small Linear after as many seconds as a large one would take.

    Forward and the input gradient take `times.forward` and `times.backward`. The gradient of the
    weight takes `times.weight` at the moment when it is added: in backward, or later if a schedule
    defers it.
    """

    def __init__(self, linear: nn.Module, times: StageTimes, sleeper: Sleeper) -> None:
        super().__init__()
        self.linear, self._times, self._sleeper = linear, times, sleeper
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        # A tensor hook, since torch's split backward adds to `grad` itself, without running hooks
        # for accumulated gradients.
        weight.register_hook(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y: Tensor = _Sleep.apply(self.linear(x), self._sleeper, self._times.backward)
        self._sleeper.sleep(self._times.forward, began=began)
        return y

    def _weight(self, _: Tensor) -> None:
        self._sleeper.sleep(self._times.weight)


class _Sleep(torch.autograd.Function):
    """The identity, with a backward that takes `seconds`.

    It follows the Linear, so that it also runs if the input of the layer needs no gradient. It
    returns a copy, since torch's pipelining detaches a stage's result, which views do not allow.
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
    """The delays of messages: random seconds, the same for every schedule in a round.

    They are exponentially distributed. `draw` draws those of a round.
    """

    def __init__(self, micro_batches: int, virtual_stages: int, seed: int) -> None:
        self._shape = (2, virtual_stages, micro_batches)
        self._seed, self._seconds = seed, torch.zeros(self._shape).tolist()

    def draw(self, mean_s: float, round_number: int) -> None:
        """Draws the delays of a round with a mean of mean_s; none if it is 0."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + round_number + 1)
        drawn = torch.empty(self._shape, dtype=torch.float64).exponential_(generator=generator)
        self._seconds = (mean_s * drawn).tolist()

    def of_receiver(self, direction: str, stage: int, micro_batch: int) -> float:
        """Returns the delay of the message that a virtual stage receives."""
        seconds: float = self._seconds[direction == "backward"][stage][micro_batch]
        return seconds

    def of_sender(self, direction: str, stage: int, micro_batch: int) -> float:
        """Returns the delay of the message that a virtual stage sends, for the simulator."""
        receiver = stage + (1 if direction == "forward" else -1)
        return self.of_receiver(direction, receiver, micro_batch)


def peaks(tasks: Iterable[Task], *, defers: bool) -> tuple[int, int]:
    """Returns the most micro-batches that wait for weight gradients, and that are held in total.

    Those in flight are held as well. tasks: what ran, in order.
    """
    in_flight = waiting = most_waiting = most_held = 0
    for task in tasks:
        in_flight += {"forward": 1, "backward": -1}.get(task.kind, 0)
        waiting += {"backward": int(defers), "weight": -1}.get(task.kind, 0)
        most_waiting = max(most_waiting, waiting)
        most_held = max(most_held, in_flight + waiting)
    return most_waiting, most_held


# --- Our pipeline, and one process without a pipeline, which it must equal -----------------------


Gradients = dict[int, Tensor]  # by the number of the layer in the whole model
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepUse:
    """What the last step needed on this rank; None: not known."""

    in_flight: int
    deferred: int | None = None
    held: int | None = None
    deferred_bytes: int | None = None
    decisions: int = 0
    decision_s: float = 0.0
    tasks: tuple[TaskRun, ...] = ()


@dataclass(frozen=True)
class System:
    """A schedule on this rank. step: runs all micro-batches; gradients: those it leaves."""

    spec: CaseSpec
    step: Callable[[], object]
    gradients: Callable[[], Gradients]
    forget: Callable[[], None]
    use: Callable[[], StepUse]
    close: Callable[[], None]


def make_linear(number: int, grid: Grid) -> Linear:
    """Returns the Linear of a layer of the model, the same for every schedule."""
    role = ("expand", "contract")[number % 2]
    return Linear(FEATURES, FEATURES, grid=grid, role=role, bias=False, seed=0, name=str(number))


def batches(plan: Plan, grid: Grid) -> list[Batch]:
    """Returns inputs and targets of each micro-batch on this rank."""
    generator = torch.Generator().manual_seed(plan.seed)
    # Each rank of a stage has its own block of the stage's input, and so its own random numbers.
    shape = (ROWS // grid.size("x") // grid.size("z"), FEATURES // grid.size("y"))
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(plan.micro_batches)
    ]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def serial_gradients(plan: Plan, grid: Grid) -> Gradients:
    """Returns the gradients of all layers after a step without a pipeline, and without sleeps."""
    layers = [make_linear(number, grid) for number in range(plan.stages * LAYERS_PER_STAGE)]
    parts = plan.micro_batches * grid.num_parts(("z", "data"))
    for x, target in batches(plan, grid):
        (loss_of(nn.Sequential(*layers)(x), target) / parts).backward()
    return _gradients(dict(enumerate(layers)))


def build_ours(spec: CaseSpec, plan: Plan, grid: Grid, delays: Delays) -> System:
    """Returns our pipeline; all ranks must call this in the same order."""
    times, sleeper = plan.times(LAYERS_PER_STAGE), Sleeper()
    layers = [
        partial(_layer, number, grid, times, sleeper)
        for number in range(plan.stages * LAYERS_PER_STAGE)
    ]
    pipeline = Pipeline(
        layers, grid, spec.options(plan.ranks_per_stage), loss=loss_of, delay=delays.of_receiver
    )
    micro_batches = batches(plan, grid)
    linears = {
        int(name): layer.linear
        for name, layer in pipeline.module.named_children()
        if isinstance(layer, EmulatedLayer)
    }
    return System(
        spec, step=partial(pipeline.step, micro_batches), gradients=partial(_gradients, linears),
        forget=partial(forget, linears), use=partial(_use, pipeline, spec), close=pipeline.close,
    )  # fmt: skip


def _layer(number: int, grid: Grid, times: StageTimes, sleeper: Sleeper) -> EmulatedLayer:
    return EmulatedLayer(make_linear(number, grid), times, sleeper)


def _use(pipeline: Pipeline, spec: CaseSpec) -> StepUse:
    stats = pipeline.stats
    deferred, held = peaks((run.task for run in stats.tasks), defers=pipeline.options.defers)
    return StepUse(
        in_flight=stats.peak_in_flight,
        deferred=deferred,
        held=held,
        deferred_bytes=stats.peak_deferred_bytes,
        decisions=stats.decisions,
        decision_s=stats.decision_seconds,
        tasks=tuple(stats.tasks),
    )


def _gradients(linears: dict[int, Any]) -> Gradients:
    return {number: linear.weight.grad.clone() for number, linear in linears.items()}


def forget(linears: dict[int, Any]) -> None:
    """Drops gradients, as before a step."""
    for linear in linears.values():
        linear.weight.grad = None


def error_of(got: Gradients, want: Gradients) -> float:
    """Returns the largest error of a gradient, relative to its largest element."""
    return max(
        float(((g - want[n]).abs().max() / want[n].abs().max()).item()) for n, g in got.items()
    )


def own_layers(plan: Plan, stage: int) -> Sequence[int]:
    """Returns the numbers of a stage's layers if each rank has one stage."""
    return range(stage * LAYERS_PER_STAGE, (stage + 1) * LAYERS_PER_STAGE)
