"""The bytes of parameters, gradients and optimizer state, which persist across steps."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.activations import ModelSizes, sizes_of
from axonn_ext.planner.search.padded_vocabulary import padded_model
from axonn_ext.planner.step.muon import owned_by
from axonn_ext.planner.step.parameters import (
    buckets_of_groups,
    elements_of,
    groups_of,
    parameters_of_share,
    qk_norms_of,
)
from axonn_ext.planner.step.stage_models import StageShare, shares_of_model
from axonn_ext.spec.buckets import BucketSizes
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import ParallelConfig

FP32, FP64 = 4, 8  # the bytes of an element


class States(NamedTuple):
    """The exact bytes of the state that persists across steps, and of all gradients.

    With zero=2, the gradients are this rank's shards of their sums.
    """

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

    Of the buckets of ZeRO or offload (spec.buckets), including their gaps and padding:

    parts         what this rank updates; without ZeRO or offload, all of its parameters
    bucket        the largest bucket; 0 if there are none
    filling       the largest buckets of all groups, which may be filled at once
    num_buckets   all buckets

    With Muon: matrices  the elements of matrices whose momentum this rank keeps
               gaps      those of `parts` that are gaps in buckets of matrices, or not this rank's
    """

    own: int
    table: int
    left: int
    left_early: int
    largest_left: int
    parts: int
    bucket: int = 0
    filling: int = 0
    num_buckets: int = 0
    matrices: int = 0
    gaps: int = 0


class StageStates(NamedTuple):
    """A pipe coordinate's share of the model on each rank, whatever the micro-batches."""

    number: int
    share: StageShare
    elements: Elements
    states: States


def states_of(job: Job, stage: int = 0, *, device: str = "cuda") -> States:
    """Returns the bytes of each rank's parameters, of all its gradients, and of its optimizer.

    stage: the rank's pipe coordinate. For each parameter, the optimizer has two moments, a step
    count and, if the dtype is not fp32, a copy in fp32 (the master). For a matrix that Muon
    updates, it has only momentum, and a master. With ZeRO or offload, it
    always has masters; with ZeRO, of this rank's shards. State on the host counts only if the host
    is the device ("cpu"), and state in mapped files never counts.
    """
    return stage_states_of(job, device=device)[stage].states


def stage_states_of(job: Job, *, device: str) -> tuple[StageStates, ...]:
    """Returns what the ranks of each pipe coordinate of a legal job have."""
    options = job.options
    return _stage_states(
        job.model, job.grid, options.pipeline.chunks,
        ParallelConfig(layout=options.layout, heads_over_y=options.heads_over_y), options.width,
        options.optimizer, device,
    )  # fmt: skip


@lru_cache(maxsize=64)  # a search asks for one grid after the other
def _stage_states(
    model: ModelConfig, grid: GridShape, chunks: int, parallel: ParallelConfig, width: int,
    optimizer: OptimizerOptions, device: str,
) -> tuple[StageStates, ...]:  # fmt: skip
    placed = padded_model(model, grid)
    size = sizes_of(placed)
    made: dict[StageShare, tuple[Elements, States]] = {}
    stages = []
    for number, share in enumerate(shares_of_model(model, grid.pipe, chunks)):
        if share not in made:
            elements = _elements_of(placed, grid, share, size, parallel)
            if optimizer.offload != "none" or optimizer.num_parts(grid.data) > 1:
                elements = _with_buckets(elements, placed, grid, share, optimizer, parallel)
            elif optimizer.is_muon:
                block = sum(elements_of(grid, linear) for linear in placed.block_linears)
                elements = elements._replace(matrices=share.num_layers * block)
            num_tensors = size.num_tensors(share)
            if optimizer.is_muon:
                num_tensors -= len(placed.block_linears) * share.num_layers
            kept = _optimizer_bytes(elements, optimizer, width, device, num_tensors)
            in_parts = optimizer.zero > 1 and grid.data > 1
            summed = elements.parts if in_parts else elements.own
            made[share] = elements, States(elements.own * width, summed * width, kept)
        stages.append(StageStates(number, share, *made[share]))
    return tuple(stages)


def _optimizer_bytes(
    elements: Elements, optimizer: OptimizerOptions, width: int, device: str, num_tensors: int
) -> int:
    """Returns what AdamW, and Muon, have in the memory of the device.

    num_tensors: those with a step count.
    """
    in_memory = {"none": True, "cpu": device == "cpu", "disk": False}[optimizer.offload]
    masters = FP32 if width < FP32 or elements.num_buckets else 0
    counts = FP32 * num_tensors if in_memory or device == "cpu" else 0
    momentum_only = elements.matrices * FP32
    updated = elements.parts - elements.gaps
    return (updated * (2 * FP32 + masters) - momentum_only) * in_memory + counts


def _with_buckets(
    elements: Elements, model: ModelConfig, grid: GridShape, share: StageShare,
    optimizer: OptimizerOptions, parallel: ParallelConfig,
) -> Elements:  # fmt: skip
    parts = optimizer.num_parts(grid.data)
    muon = optimizer.is_muon
    sizes = buckets_of_groups(
        groups_of(model, grid, share, parallel, muon=muon), optimizer.bucket_elements, parts
    )
    found = _with_buckets_of_groups(elements, sizes, parts)
    if not muon:
        return found
    owned = owned_by(model, grid, share.num_layers)
    own = sum(
        count * elements_of(grid, w)
        for count, w in zip(owned.counts, model.block_linears, strict=True)
    )
    return found._replace(
        parts=found.parts + sum(owned.parts),
        bucket=max(found.bucket, parts * max(owned.parts, default=0)),
        filling=found.filling + parts * sum(owned.classes),
        num_buckets=found.num_buckets + len(owned.parts),
        matrices=own,
        gaps=sum(owned.parts) - own,
    )


def _with_buckets_of_groups(
    elements: Elements, sizes: list[tuple[tuple[str, ...], BucketSizes]], parts: int
) -> Elements:
    return elements._replace(
        parts=sum(s.total for _, s in sizes) // parts,
        bucket=max((s.largest for _, s in sizes), default=0),
        filling=sum(s.largest for _, s in sizes),
        num_buckets=sum(s.num_full + (s.last > 0) for _, s in sizes),
    )


def _elements_of(
    model: ModelConfig, grid: GridShape, share: StageShare, size: ModelSizes,
    parallel: ParallelConfig,
) -> Elements:  # fmt: skip
    x, y, z = grid.x, grid.y, grid.z
    own = parameters_of_share(model, grid, share, parallel)
    tables = share.has_first + share.has_last
    tables = min(tables, 1) if size.tied else tables
    whole_table = size.vocab * size.hidden // (x * y * z)
    table = whole_table if tables else 0
    if grid.data > 1:
        largest = max(table, size.runs[1] // (x * y * z))
        return Elements(own, table, own, own - table, largest, own)
    small = 0
    if z > 1:
        matrices = share.num_layers * size.block // (x * y * z)
        small = own - matrices - table * tables  # norms, biases, positions
    elif x > 1 and parallel.sharded:  # all small parameters except biases
        vectors = (len(size.norms) * share.num_layers + share.has_last) * size.norm_vectors
        small = (vectors + model.num_positions * share.has_first) * size.hidden // y
    qk_norms = qk_norms_of(model, grid, parallel)
    small += share.num_layers * sum(
        norm.elements
        for norm in qk_norms
        if z == 1 and any(getattr(grid, axis) > 1 for axis in norm.axes)
    )
    return Elements(own, table, small, small, 0, own)
