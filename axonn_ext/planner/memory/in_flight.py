"""Counts the micro-batches that the stages of a pipeline hold at once.

A unit is one micro-batch of one chunk. It is in flight from its forward to the end of its backward;
where weight gradients are computed separately, it is then deferred until they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.activations import deferred_bytes_of
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.pipeline import Task, fixed_order
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.pipeline_simulator import StageTimes, simulate

# From this many micro-batches on, in multiples of the stages, peaks are constant or grow linearly.
_FEW, _SOME = 4, 6


class Units(NamedTuple):
    """The units that a stage holds at once, including the running one.

    has_gradients: whether the backward of another unit has ended in this step, so that there are
    gradients already.
    """

    in_flight: int
    deferred: int
    has_gradients: bool


def units_of(job: Job, stage: int) -> tuple[Units, ...]:
    """Returns a pipe coordinate's units at the moments of a step that may be the fullest.

    The schedule message_driven counts with as many units in flight as it allows, since their number
    depends on the arrival of messages. Its deferred units are simulated with stage times in
    proportion to operations, unless there is a limit of bytes.
    """
    options, pipe, parts = job.options.pipeline, job.grid.pipe, job.options.micro_batches
    if options.schedule != "message_driven":
        return _of_fixed_order(options, pipe, stage, parts)
    # The last stage runs the backward of a micro-batch right after its forward.
    in_flight = 1 if stage == pipe - 1 else min(parts, options.most_in_flight(pipe, stage))
    if not options.defers:
        return _of_one_kind(in_flight, parts)
    if options.deferred_bytes:
        return (Units(in_flight, min(parts, most_deferred(job)[stage]), True),)
    return _of_message_driven(options, _stage_costs(job), parts)[stage]


def most_deferred(job: Job) -> tuple[int, ...]:
    """Returns how many units' weight gradients may wait on each stage.

    With deferred_bytes, the oldest run first as soon as those that wait hold that many bytes.
    """
    options, stages = job.options.pipeline, range(job.grid.pipe)
    most = options.most_deferred(job.grid.pipe)
    if most is not None:
        return (most,) * job.grid.pipe
    of_one = (max(1, deferred_bytes_of(job, stage)) for stage in stages)
    return tuple(-(-options.deferred_bytes // num_bytes) for num_bytes in of_one)


def _of_one_kind(in_flight: int, parts: int) -> tuple[Units, ...]:
    """Returns the units where nothing is deferred, given the most that may be in flight."""
    if parts > in_flight:  # others follow the first ones
        return (Units(in_flight, 0, True),)
    without = Units(in_flight, 0, False)
    return (without, Units(in_flight - 1, 0, True)) if in_flight > 1 else (without,)


@lru_cache(maxsize=4096)
def _of_fixed_order(
    options: PipelineOptions, pipe: int, stage: int, parts: int
) -> tuple[Units, ...]:
    if options.schedule == "gpipe":
        return _of_one_kind(parts, parts)
    order = fixed_order(
        options.schedule, stages=pipe, stage=stage, micro_batches=min(parts, _FEW * pipe),
        chunks=options.chunks,
    )  # fmt: skip
    return fullest_units(order, defers=options.defers)


def _stage_costs(job: Job) -> tuple[float, ...]:
    """Returns the operations of each stage, in multiples of a block's."""
    model = job.model
    head = model.head_flops_per_token() / model.block_flops_per_token()
    return tuple(share.num_layers + share.has_last * head for share in shares_of(job))


@lru_cache(maxsize=4096)
def _of_message_driven(
    options: PipelineOptions, costs: tuple[float, ...], parts: int
) -> tuple[tuple[Units, ...], ...]:
    """Returns each stage's units if the number of deferred units, not their bytes, is limited."""
    pipe = len(costs)
    most = options.most_deferred(pipe)
    assert most is not None

    def fullest(count: int) -> list[tuple[Units, ...]]:
        simulation = simulate(
            options.schedule, [StageTimes(c, c, c) for c in costs], count, defer_weights=True,
            in_flight=[options.most_in_flight(pipe, s) for s in range(pipe)], max_deferred=most,
        )  # fmt: skip
        return [
            fullest_units((task for task, _, _ in run), defers=True) for run in simulation.tasks
        ]

    few, some = _FEW * pipe, _SOME * pipe
    if parts <= some:
        return tuple(fullest(parts))
    longer = (parts - some) / (some - few)
    return tuple(
        _longer(high, longer * (max(u.deferred for u in high) - max(u.deferred for u in low)), most)
        for low, high in zip(fullest(few), fullest(some), strict=True)
    )


def _longer(units: tuple[Units, ...], growth: float, most: int) -> tuple[Units, ...]:
    return tuple(u._replace(deferred=min(most, math.ceil(u.deferred + growth))) for u in units)


def fullest_units(tasks: Iterable[Task], *, defers: bool) -> tuple[Units, ...]:
    """Returns the moments of an order that no other moment matches or exceeds in every number.

    defers: whether weight gradients are computed as separate tasks.
    """
    in_flight = deferred = 0
    has_gradients = False
    found: set[Units] = set()
    for task in tasks:
        in_flight += task.kind == "forward"
        found.add(Units(in_flight, deferred, has_gradients))
        if task.kind == "backward":
            in_flight -= 1
            deferred += defers
            has_gradients = has_gradients or not defers
        elif task.kind == "weight":
            deferred -= 1
            has_gradients = True
    return tuple(sorted(u for u in found if not any(_exceeds(other, u) for other in found)))


def _exceeds(a: Units, b: Units) -> bool:
    return a != b and all(mine >= yours for mine, yours in zip(a, b, strict=True))
