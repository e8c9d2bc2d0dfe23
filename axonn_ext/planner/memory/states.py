"""The bytes of parameters, gradients and optimizer, which live from step to step."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.activations import ModelSizes, sizes_of
from axonn_ext.planner.shares import StageShare, share_of, shares_of_model
from axonn_ext.planner.step.parameters import parameters_of_share
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig

FP32, FP64 = 4, 8  # the bytes of an element


class States(NamedTuple):
    """The exact bytes of the state that lives from step to step, and of all gradients."""

    parameters: int
    gradients: int
    optimizer: int


class Elements(NamedTuple):
    """The elements of a rank's parameters and of the gradients that must be summed after backward.

    own           all of the rank's parameters
    table         the rank's shard of the embedding table
    left          the gradients that must be summed after backward
    left_early    those of `left` that are complete before the table's gradient
    largest_left  the largest gradient of `left`; 0 if all of them are small
    """

    own: int
    table: int
    left: int
    left_early: int
    largest_left: int


class StageStates(NamedTuple):
    """What a rank of a pipe coordinate has of the model, whatever the micro-batches."""

    number: int
    share: StageShare
    elements: Elements
    states: States


def states_of(job: Job, stage: int = 0) -> States:
    """Returns the bytes of each rank's parameters, of all its gradients, and of its optimizer.

    stage: the rank's pipe coordinate. For each parameter, the optimizer has two moments, a step
    count and, if the dtype is not fp32, a copy in fp32 (the master).
    """
    share = share_of(job, stage)
    own = parameters_of_share(job.model, job.grid, share)
    return _states(sizes_of(job.model), share, own, job.options.width)


def stage_states_of(job: Job) -> tuple[StageStates, ...]:
    """Returns what the ranks of each pipe coordinate of a legal job have."""
    options = job.options
    return _stage_states(
        job.model, job.grid, options.pipeline.chunks, options.sharded, options.width
    )


@lru_cache(maxsize=64)  # a search asks for one grid after the other
def _stage_states(
    model: ModelConfig, grid: GridShape, chunks: int, sharded: bool, width: int
) -> tuple[StageStates, ...]:
    size = sizes_of(model)
    made: dict[StageShare, tuple[Elements, States]] = {}
    stages = []
    for number, share in enumerate(shares_of_model(model, grid.pipe, chunks)):
        if share not in made:
            elements = _elements_of(model, grid, share, size, sharded=sharded)
            made[share] = elements, _states(size, share, elements.own, width)
        stages.append(StageStates(number, share, *made[share]))
    return tuple(stages)


def _states(size: ModelSizes, share: StageShare, own: int, width: int) -> States:
    masters = 0 if width == FP32 else FP32
    counts = FP32 * size.num_tensors(share)
    return States(own * width, own * width, own * (2 * FP32 + masters) + counts)


def _elements_of(
    model: ModelConfig, grid: GridShape, share: StageShare, size: ModelSizes, *, sharded: bool
) -> Elements:
    x, y, z = grid.x, grid.y, grid.z
    own = parameters_of_share(model, grid, share)
    tables = share.has_first + share.has_last
    tables = min(tables, 1) if size.tied else tables
    whole_table = size.vocab * size.hidden // (x * y * z)
    table = whole_table if tables else 0
    if grid.data > 1:
        largest = max(table, size.runs[1] // (x * y * z))
        return Elements(own, table, own, own - table, largest)
    small = 0
    if z > 1:
        matrices = share.num_layers * size.block // (x * y * z)
        small = own - matrices - table * tables  # norms, biases, positions
    elif x > 1 and sharded:  # all small parameters but biases
        vectors = (2 * share.num_layers + share.has_last) * size.norm_vectors
        small = (vectors + model.num_positions * share.has_first) * size.hidden // y
    if z == 1 and (x > 1 or (y > 1 and sharded)):  # norms of heads
        small += share.num_layers * model.head_norm_size
    return Elements(own, table, small, small, 0)
