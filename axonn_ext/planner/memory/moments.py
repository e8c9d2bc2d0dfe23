"""The moments of a step that may be its peak, and the memory of each besides the states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from axonn_ext.planner.memory.activations import deferred_bytes_of
from axonn_ext.planner.memory.divided import after_backward, kept_gradients, taken
from axonn_ext.planner.memory.gathered import gathered_weights
from axonn_ext.planner.memory.orthogonalised import muon_buffers
from axonn_ext.planner.memory.products import (
    backward_internals,
    block_backward,
    block_forward,
    embedding_rows,
    forward_internals,
)
from axonn_ext.planner.memory.stage import Stage
from axonn_ext.planner.memory.sums import full_buckets, scatters, sums, table_sum, wide_gradients

# Pipeline messages held: in each direction, one being sent and one that has arrived. This is a
# guess: more of them wait for a stage that is late.
_MESSAGES = 4


class Moment(NamedTuple):
    """The bytes that are held at one moment; see Memory."""

    gradients: int
    gathered_weights: int
    activations: int
    logits: int
    buffers: int


def moments(stage: Stage) -> list[Moment]:
    """Returns the moments that may be the peak.

    In forward, these are the MLP of the last block, lm_head and the loss. In backward, they are
    lm_head, the last block, the first block and the embedding. The sums of gradients and the
    optimizer come last. A stage has only the moments of its own parts.
    """
    if stage.num_parts > 1:
        summed = (Moment(gradients, 0, 0, 0, b) for gradients, b in after_backward(stage))
        return [*_moments_of_passes(stage), *summed]
    everything = stage.elements.own * stage.width
    return [
        *_moments_of_passes(stage),
        Moment(everything, 0, 0, 0, sums(stage)),
        Moment(everything, 0, 0, 0, max(wide_gradients(stage), muon_buffers(stage))),
    ]


def _moments_of_passes(stage: Stage) -> Iterator[Moment]:
    if not stage.in_stages:
        yield from _moments_with(stage, has_gradients=stage.options.micro_batches > 1)
        return
    messages = _messages(stage)
    for has_gradients, others in _other_units(stage).items():
        g, w, a, n, b = max(_moments_with(stage, has_gradients=has_gradients), key=sum)
        yield Moment(g, w, a + others, n, b + messages)


def _moments_with(stage: Stage, *, has_gradients: bool) -> Iterator[Moment]:
    """Yields the moments of a micro-batch's passes.

    has_gradients: whether all gradients are there from the beginning, because earlier
    micro-batches have computed them.
    """
    size, kept, width, share = stage.size, stage.kept, stage.width, stage.share
    gradients = kept_gradients(stage) if has_gradients else 0
    held, first_held, last_held = gathered_weights(stage)
    # If any block is recomputed, the first one is, and then keeps as much as any other.
    first = kept.block_input * (stage.options.recomputation.blocks > 0) + kept.block
    blocks = kept.blocks(stage.running, stage.again) + kept.received
    again = kept.block if stage.last_again else 0
    scattered = stage.z > 1 and stage.overlap is not None
    table = stage.table if share.has_last else 0
    head_gradient = table if stage.tied or scattered else table // stage.z
    after_head = 2 * table if scattered and not stage.tied else head_gradient
    early_gradients, late_gradients = _gradients_of_blocks(stage, has_gradients=has_gradients)
    forward, forward_buffers = block_forward(stage)
    block, block_buffers = block_backward(stage)
    block_buffers += scatters(stage)
    # A tied table's gradient is complete only when the embedding's backward has run.
    waiting = head_gradient if stage.tied else 0
    waiting += full_buckets(stage)
    yield Moment(gradients, held, blocks + again + forward, 0, forward_buffers)
    if share.has_last:
        head = size.vocab // stage.x, size.hidden // stage.y, stage.x, stage.y
        logits = stage.my * head[0]
        ends = blocks + kept.ends
        yield Moment(
            gradients, held, ends, logits * width, forward_internals(stage, *head, size.tied)
        )
        yield Moment(gradients, held, ends, kept.loss, 0)
        # The gradient of the logits overwrites them.
        inside = head_gradient + backward_internals(stage, *head, size.tied)
        yield Moment(gradients, held, ends + stage.stream, logits * width, max(after_head, inside))
    if stage.sums_early and not stage.tied:
        after_head = 0  # it is in buckets
    complete, under_way = early_gradients
    buffers = after_head + block_buffers + under_way
    yield Moment(complete, first_held, blocks + again + block, 0, buffers)
    complete, under_way = late_gradients
    waiting += under_way
    yield Moment(complete, last_held, first + block, 0, waiting + block_buffers)
    if share.has_first:
        in_buckets = stage.elements.filling * width if stage.sums_early else 0
        buffers = waiting + table_sum(stage) + in_buckets
        yield Moment(complete, 0, embedding_rows(stage), 0, buffers)


def _gradients_of_blocks(
    stage: Stage, *, has_gradients: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns complete gradients, and buckets of ZeRO under way, in the last and first block.

    At the first block, all gradients but the table's are there.
    """
    elements = stage.elements
    if stage.sums_early:
        head = elements.table if stage.share.has_last and not stage.tied else 0
        return (
            taken(stage, head, has_gradients=has_gradients),
            taken(stage, elements.own - elements.table, has_gradients=has_gradients),
        )
    early = kept_gradients(stage) if has_gradients else 0
    return (early, 0), (early or (elements.own - elements.table) * stage.width, 0)


def _other_units(stage: Stage) -> dict[bool, int]:
    """Returns the bytes that the stage keeps of micro-batches other than the running one.

    These are what micro-batches in flight keep for backward, and what deferred weight gradients
    need, the same for every chunk. The keys say whether there are gradients at that moment.
    """
    pipeline = stage.options.pipeline
    kept = stage.kept.total(stage.layers, stage.options.recomputation)
    deferred = deferred_bytes_of(stage.job, stage.number) if pipeline.defers else 0
    most: dict[bool, int] = {}
    for units in stage.units:
        held = (units.in_flight - 1) * kept + units.deferred * deferred
        held //= pipeline.chunks
        most[units.has_gradients] = max(held, most.get(units.has_gradients, 0))
    return most


def _messages(stage: Stage) -> int:
    """Returns the bytes of messages under way."""
    whole = not stage.sharded and stage.m % stage.x == 0
    return _MESSAGES * (stage.stream // stage.x if whole else stage.stream)
