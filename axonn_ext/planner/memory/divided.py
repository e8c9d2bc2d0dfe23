"""Memory of ZeRO and offload besides the states: buckets being filled, exchanged and updated.

Legend: B elements of the largest bucket, p data ranks that shard it, w bytes per element.
Sources of the numbers: axonn_ext/optim/zero/shards.py, axonn_ext/overlap/exchange.py and
axonn_ext/optim/bucketed.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_ext.planner.memory.orthogonalised import muon_buffers
from axonn_ext.planner.memory.stage import Stage
from axonn_ext.planner.memory.states import FP32

_UNDER_WAY = 2  # buckets whose sums are under way at a time
_RETURNING = 2  # buckets that are all-gathered, or copied to the parameters, at a time
_UPDATED = 3  # shards of new parameters: of buckets being updated, and of one being sent


def kept_gradients(stage: Stage) -> int:
    """Returns the bytes of earlier micro-batches' gradients: whole, or shards of sums (zero=2)."""
    if stage.options.optimizer.zero > 1 and stage.num_parts > 1:
        return stage.elements.parts * stage.width
    return stage.elements.own * stage.width


def taken(stage: Stage, elements: int, *, has_gradients: bool) -> tuple[int, int]:
    """Returns the bytes held for a backward pass's first `elements` gradients, summed as they come.

    The first number counts shards of sums, and buckets being filled, each allocated as a whole. The
    second counts the buckets under way.

    has_gradients: whether there are shards of sums of earlier micro-batches.
    """
    if elements == 0:
        return (kept_gradients(stage) if has_gradients else 0), 0
    bucket, parts = stage.elements.bucket, stage.num_parts
    full = elements // bucket if bucket else 0
    summed = full * bucket // parts
    sums = stage.elements.parts if has_gradients else summed
    return (sums + stage.elements.filling) * stage.width, _under_way(stage, full)


def while_taking(stage: Stage) -> int:
    """Returns the bytes that buckets need while gradients stay whole until a bucket takes them.

    Buckets are allocated as a whole when the first gradient goes into them, and a gradient that is
    larger than a bucket stays until all of it is taken.
    """
    bucket = stage.elements.bucket
    filling, under_way = bucket * stage.width, _under_way(stage, _UNDER_WAY)
    if max(stage.elements.table, stage.size.runs[1] // stage.split) > bucket:
        return filling + under_way
    return max(filling, under_way - filling if stage.overlap is not None else under_way)


def after_backward(stage: Stage) -> Iterator[tuple[int, int]]:
    """Yields gradients and buffers while ZeRO sums, takes the norm of gradients, and updates."""
    elements, width, parts = stage.elements, stage.width, stage.num_parts
    if stage.sums_early:
        yield taken(stage, elements.own, has_gradients=stage.options.micro_batches > 1)
    else:
        yield elements.own * width, while_taking(stage)
    sums = elements.parts * width
    yield sums, elements.parts * stage.wide  # fp32 copies for the norm
    part = elements.bucket // parts
    count = elements.num_buckets
    buffers = min(count, _RETURNING) * elements.bucket * width + min(count, _UPDATED) * part * width
    if stage.options.optimizer.offload == "none":
        # A scaled gradient in fp32, and the widened one from which it is computed.
        buffers += part * (FP32 + stage.wide)
    yield sums, buffers + muon_buffers(stage)


def _under_way(stage: Stage, full: int) -> int:
    """Returns the bytes of buckets being reduce-scattered, if `full` buckets are full.

    With overlap, each has a send and a receive buffer. Without, one at a time has been summed, on
    the CPU in fp32 copies, and its shard remains.
    """
    bucket = stage.elements.bucket
    if stage.overlap is not None:
        return min(full, _UNDER_WAY) * 2 * bucket * stage.width
    if not full:
        return 0
    copies = stage.copy * (bucket + bucket // stage.num_parts)
    return copies + bucket // stage.num_parts * stage.width
