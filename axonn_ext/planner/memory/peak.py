"""Computes the bytes that a rank holds, item by item, at the peak of a step.

Several moments of a step may be its peak. The bytes of each are computed, and the largest sum is
taken. In forward, these moments are the last block, lm_head and the loss. In backward, they are
lm_head, the last block (all activations are still kept), the first block (all gradients but the
table's are there) and the embedding. After backward, they are the sums of gradients and the
optimizer. The letters in formulas are explained in activations.py.

In a pipeline, stages hold different numbers of micro-batches; the fullest stage counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import DEVICES, Machine
from axonn_ext.planner.memory.in_flight import fullest_units, units_of
from axonn_ext.planner.memory.moments import moments
from axonn_ext.planner.memory.stage import Stage
from axonn_ext.planner.memory.states import FP64, StageStates, States, stage_states_of
from axonn_ext.planner.memory.workspaces import workspaces
from axonn_ext.planner.step.stage_models import StageShare
from axonn_ext.spec.pipeline import Task


class Memory(NamedTuple):
    """The bytes of one rank at the peak of a step.

    parameters        the parameters in the job's dtype
    gradients         the complete gradients in the job's dtype; with one micro-batch, 0 if the peak
                      comes before or early in backward (`states_of` counts all gradients)
    optimizer         AdamW's two moments in fp32, and fp32 masters; see states_of
    gathered_weights  the weights that are held gathered over z
    activations       the tensors that all blocks keep for backward, and those that one block needs
                      while it runs; in a pipeline, also those kept for other micro-batches
    logits            the memory of lm_head and the loss
    buffers           the buffers of gradients being summed, of collectives and of ops, and the
                      angles of rotary positions
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_weights: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the largest item."""
        return max(self._fields, key=lambda name: getattr(self, name))


def memory_of(job: Job, *, device: str = "cuda", auto_fuses: bool = False) -> Memory:
    """Returns the memory that each rank of a legal job needs; in a pipeline, the fullest stage.

    device: "cuda" or "cpu". On the CPU, collectives copy bf16 and fp16 to fp32 to sum them.
    auto_fuses: whether algorithm "auto" may choose "fused" on a GPU. The workspaces of the fused
    ops then count in addition to the buffers of the other algorithms.

    Raises PlannerError for any other device.
    """
    if device not in DEVICES:
        raise PlannerError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return fullest(job, fullest_stages(job, device), device, auto_fuses=auto_fuses)


def memory_on(job: Job, machine: Machine) -> Memory:
    """Returns the memory that each rank of a legal job needs on a machine; see memory_of."""
    return memory_of(job, device=machine.device, auto_fuses=machine.auto_fuses)


def stage_memory_of(
    job: Job, stage: int, *, device: str = "cuda", order: Iterable[Task] | None = None
) -> Memory:
    """Returns the memory of a rank of one pipe coordinate of a pipeline; see memory_of.

    order: the tasks that the stage ran in a step, if known, else those of the schedule; with
    message_driven they depend on when messages arrive.
    """
    has = stage_states_of(job, device=device)[stage]
    if order is None:
        return fullest(job, [has], device)
    units = fullest_units(order, defers=job.options.pipeline.defers)
    return _memory_of(Stage(job, has, device, units), has.states)


def fullest_stages(job: Job, device: str) -> Sequence[StageStates]:
    """Returns the stages that may be the fullest.

    Of stages with equal shares of the model, earlier ones have more micro-batches in flight.
    """
    stages = stage_states_of(job, device=device)
    if job.options.pipeline.defers:
        return stages
    kinds: dict[StageShare, StageStates] = {}
    for stage in stages:
        kinds.setdefault(stage.share, stage)
    return list(kinds.values())


def fullest(
    job: Job, stages: Iterable[StageStates], device: str, *, auto_fuses: bool = False
) -> Memory:
    """Returns the memory of the fullest of these stages."""
    in_stages = job.grid.pipe > 1

    def memory(has: StageStates) -> Memory:
        units = units_of(job, has.number) if in_stages else ()
        return _memory_of(Stage(job, has, device, units, auto_fuses=auto_fuses), has.states)

    return max(map(memory, stages), key=lambda memory: memory.total)


def _memory_of(stage: Stage, states: States) -> Memory:
    peak = max(moments(stage), key=sum)
    return Memory(
        parameters=states.parameters,
        gradients=peak.gradients,
        optimizer=states.optimizer,
        gathered_weights=peak.gathered_weights,
        activations=peak.activations,
        logits=peak.logits,
        # The angles of rotary positions and the workspaces stay.
        buffers=peak.buffers
        + 2 * FP64 * stage.size.rotary * stage.size.rotations
        + workspaces(stage),
    )
