"""torch.distributed.pipelining on the same emulated stages.

Its 1F1B is Schedule1F1B. Its zero-bubble schedule for one stage on each rank is
ScheduleInterleavedZeroBubble (ZB1P of arXiv:2401.10241); ScheduleZBVZeroBubble needs two stages on
each rank. It splits a backward by autograd's graph, except on the first stage, where the whole
backward is the weight task.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
)

from axonn_ext.bench.pipeline.plan import FEATURES, LAYERS_PER_STAGE, CaseSpec, Plan
from axonn_ext.bench.pipeline.systems import (
    EmulatedLayer,
    Sleeper,
    StepUse,
    System,
    batches,
    forget,
    loss_of,
    make_linear,
    own_layers,
)
from axonn_ext.ranks.grid import Grid


def build_torch(spec: CaseSpec, plan: Plan, grid: Grid) -> System:
    """Returns torch's pipeline on a grid that has several ranks along pipe only."""
    axis = grid.axis("pipe")
    linears = {number: _linear(number, grid) for number in own_layers(plan, axis.rank)}
    times, sleeper = plan.times(LAYERS_PER_STAGE), Sleeper()
    layers = [EmulatedLayer(linear, times, sleeper) for linear in linears.values()]
    module = nn.Sequential(*layers)
    stage = PipelineStage(
        module, axis.rank, axis.size, torch.device("cpu"), group=axis.process_group
    )
    schedule = (
        Schedule1F1B(stage, plan.micro_batches, loss_fn=loss_of)
        if spec.schedule == "1f1b"
        else ScheduleInterleavedZeroBubble([stage], plan.micro_batches, loss_fn=loss_of)
    )
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(plan, grid), strict=True))
    peak = _Peak(stage, module)
    arguments = (inputs,) if stage.is_first else ()
    # `losses` is what makes a schedule collect them, as a training loop would.
    target = targets if stage.is_last else None

    def step() -> None:
        peak.in_flight = 0
        losses: list[Tensor] | None = [] if stage.is_last else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)

    return System(
        spec, step=step, gradients=lambda: {n: _grad(linear) for n, linear in linears.items()},
        forget=partial(forget, linears), use=lambda: StepUse(peak.in_flight), close=lambda: None,
    )  # fmt: skip


class _Peak:
    """Counts the micro-batches whose activations a stage of torch's holds."""

    def __init__(self, stage: PipelineStage, module: nn.Module) -> None:
        self._stage, self.in_flight = stage, 0
        module.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.in_flight = max(self.in_flight, len(self._stage.fwd_cache) + 1)


def _linear(number: int, grid: Grid) -> nn.Linear:
    linear = nn.Linear(FEATURES, FEATURES, bias=False)
    with torch.no_grad():
        linear.weight.copy_(make_linear(number, grid).weight)
    return linear


def _grad(linear: nn.Linear) -> Tensor:
    assert linear.weight.grad is not None
    return linear.weight.grad.clone()
