"""Predicts a configuration: first by closed forms, then by simulating the schedule of its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from axonn_ext.planner.costs import Costs, TaskCost
from axonn_ext.planner.held import block_is_held, held_share
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.memory import Memory
from axonn_ext.planner.pipelines import simulate_pipeline
from axonn_ext.planner.program import model_flops_of_rank, parameters_of_rank, parts_of
from axonn_ext.planner.shares import shares_of
from axonn_ext.planner.timeline import simulate
from axonn_ext.spec.pipeline import bubble_seconds


@dataclass(frozen=True)
class Estimate:
    """A configuration, and the prediction for one step of it.

    compute_s      the seconds of products, elementwise work and the optimizer
    exposed_s      axis -> the seconds for which computation waits for the axis's collectives
    peak_fraction  model flops (nothing counted twice) per second over the machine's peak
    tokens_per_s   the rate of all ranks together
    binding        what limits the step, in words
    """

    job: Job
    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    optimizer_s: float
    memory: Memory
    peak_fraction: float
    tokens_per_s: float
    binding: str


class Pieces(NamedTuple):
    """The seconds of parts of a micro-batch, which do not depend on recomputation or overlap.

    fixed, fixed_z: what runs once per micro-batch, on the path and over z.
    forward, backward, gather, scatter: one block on the path and over z.
    saved: the part of a block's backward that keeping gathered inputs would save.
    sums: the sums of all gradients over the axes that are left after backward.
    wire_*: the part of these times in which collectives on the path use z's wire.
    """

    fixed: float
    fixed_z: float
    forward: float
    backward: float
    gather: float
    scatter: float
    saved: float
    sums: float
    wire_fixed: float
    wire_forward: float
    wire_backward: float


def pieces_of(job: Job, machine: Machine) -> Pieces:
    """Returns the pieces of a legal job, all of whose options but the layout are defaults.

    heads_over_y may be set, too. In a pipeline, they are those of the last stage, and those of a
    block are those of every stage.
    """
    last_stage = job.grid.pipe - 1
    costs = Costs(machine, job.grid, job.options.dtype)
    parts = parts_of(replace(job, options=replace(job.options, overlap=None)), last_stage)
    first, block, last, last_back, block_back, first_back = (
        [costs.task(task) for task in part] for part in parts
    )
    ends = [*first, *last, *last_back, *first_back]
    beside_z = costs.beside("z")

    def on_wire(several: Iterable[TaskCost]) -> float:
        return sum(t for cost in several for axis, t in cost.path if axis in beside_z)

    return Pieces(
        fixed=sum(c.seconds for c in ends),
        fixed_z=sum(c.gather + c.scatter for c in ends),
        forward=sum(c.seconds for c in block),
        backward=sum(c.seconds for c in block_back),
        gather=sum(c.gather for c in block),
        scatter=sum(c.scatter for c in block_back),
        # The gather of its input is the only collective of a wgrad on the path.
        saved=sum(
            cost.seconds - cost.compute
            for task, cost in zip(parts.block_backward, block_back, strict=True)
            if task.matmul is not None and task.matmul.layout == "TN"
        ),
        wire_fixed=on_wire(ends),
        wire_forward=on_wire(block),
        wire_backward=on_wire(block_back),
        sums=costs.all_reduce("data", parameters_of_rank(job, last_stage) * job.options.width),
    )


def closed_form_s(pieces: Pieces, job: Job) -> float:
    """Returns the seconds of a step without the optimizer.

    Products and the collectives of activations are on the path. The collectives of weights and
    gradients run beside them as far as the path is long enough. In a pipeline, the bubble is that
    of stages that all take as long as the slowest one, with messages that are free.

    Source: the volumes of arXiv:2305.13525, section 4, each over its axis' bandwidth; see
    bubble_seconds.
    """
    options, parts = job.options, job.options.micro_batches
    again = pieces.forward if options.recompute else 0.0
    backward = pieces.backward - (pieces.saved if options.save_gathered else 0.0)
    shares = shares_of(job)
    if job.grid.pipe == 1:
        passes, layers = _passes_s(pieces, job, job.model.num_layers, parts), job.model.num_layers
    else:
        layers = max(share.num_layers for share in shares)
        without_ends = pieces._replace(fixed=0.0, fixed_z=0.0, wire_fixed=0.0)
        one = max(
            _passes_s(pieces, job, shares[-1].num_layers, 1),
            _passes_s(without_ends, job, layers, 1),
        )
        passes = parts * one + _bubble_s(job, one)
    if options.overlap is None:
        return passes + pieces.sums
    beside = layers * (again + backward)
    sums = 2 * pieces.sums if options.width == 2 else pieces.sums  # gradients are sent in fp32
    return passes + max(0.0, sums - beside)


def _bubble_s(job: Job, one: float) -> float:
    """Returns how long stages idle which take `one` second for a micro-batch, a third for each of
    forward, input gradient and weight gradient."""
    options = job.options.pipeline
    schedule = options.schedule
    if schedule == "message_driven":
        schedule = "zero_bubble" if options.defer_weights else "1f1b"
    return bubble_seconds(
        schedule, stages=job.grid.pipe, forward=one / 3, backward=one / 3, weight=one / 3,
        chunks=options.chunks,
    )  # fmt: skip


def _passes_s(pieces: Pieces, job: Job, layers: int, parts: int) -> float:
    """Returns the seconds of the forward and backward passes of `parts` micro-batches."""
    options = job.options
    again = pieces.forward if options.recompute else 0.0
    backward = pieces.backward - (pieces.saved if options.save_gathered else 0.0)
    on_path = pieces.fixed + layers * (pieces.forward + again + backward)
    gathers = 1 + options.reshard_after_forward + options.recompute
    if options.overlap is None:
        over_z = pieces.fixed_z + layers * (gathers * pieces.gather + pieces.scatter)
        return parts * (on_path + over_z)
    # Each pass gathers the weights once, except those that the budget keeps at the turn between two
    # passes.
    again_z = options.recompute and not block_is_held(job)
    passes = (2 + again_z) * parts - (2 * parts - 1) * held_share(job, layers)
    over_z = parts * (pieces.fixed_z + layers * pieces.scatter) + passes * layers * pieces.gather
    if over_z:
        times = 2 if options.recompute else 1
        path = pieces.wire_fixed + layers * (times * pieces.wire_forward + pieces.wire_backward)
        over_z += parts * path
    return max(parts * on_path, over_z)


def estimate(job: Job, machine: Machine, memory: Memory) -> Estimate:
    """Predicts a configuration by simulating its step."""
    pipeline = simulate_pipeline(job, machine) if job.grid.pipe > 1 else None
    result = simulate(job, machine) if pipeline is None else pipeline.step
    flops = model_flops_of_rank(job)
    exposed = {axis: seconds for axis, seconds in result.exposed_s.items() if seconds > 0}
    tokens = job.batch_size * job.model.sequence_length
    return Estimate(
        job=job,
        step_time_s=result.step_time_s,
        compute_s=result.compute_s,
        exposed_s=exposed,
        optimizer_s=result.optimizer_s,
        memory=memory,
        peak_fraction=flops / result.step_time_s / machine.peak_flops[job.options.dtype],
        tokens_per_s=tokens / result.step_time_s,
        binding=_binding(result.compute_s, exposed, machine, memory),
    )


def _binding(
    compute_s: float, exposed_s: Mapping[str, float], machine: Machine, memory: Memory
) -> str:
    """Says what takes most of a step's time, and whether memory is nearly used up."""
    axis = max(exposed_s, key=lambda a: exposed_s[a], default="")
    limit = "compute"
    if axis and exposed_s[axis] > 0.25 * compute_s:
        limit = "the pipeline's bubble" if axis == "pipe" else f"communication over {axis}"
    if memory.total > 0.8 * machine.memory_bytes:
        limit += f"; memory ({memory.largest.replace('_', ' ')})"
    return limit
