"""Our pipeline on emulated stages, and one process without a pipeline, which it must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.bench.pipeline.plan import FEATURES, LAYERS_PER_STAGE, ROWS, CaseSpec, Plan
from axonn_ext.bench.pipeline.stages import Delays, EmulatedLayer, Sleeper, peaks
from axonn_ext.grid import Grid
from axonn_ext.nn import Linear
from axonn_ext.pipeline import Pipeline
from axonn_ext.pipeline.engine import TaskRun
from axonn_ext.planner.pipeline_simulator import StageTimes

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
    """A schedule on this rank. step: runs all micro-batches; gradients: what it has left."""

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
    # As each rank of a stage has its own block of a stage's input, it has its own random numbers.
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
    """Returns a pipeline of ours; all ranks must call this in the same order."""
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
    """Returns the largest error of a gradient, over the largest element of it."""
    return max(
        float(((g - want[n]).abs().max() / want[n].abs().max()).item()) for n, g in got.items()
    )


def own_layers(plan: Plan, stage: int) -> Sequence[int]:
    """Returns the numbers of a stage's layers where each rank has one stage."""
    return range(stage * LAYERS_PER_STAGE, (stage + 1) * LAYERS_PER_STAGE)
