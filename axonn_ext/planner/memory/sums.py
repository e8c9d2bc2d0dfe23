"""The memory that sums of gradients need: over z, in buckets, and for copies in fp32."""

from __future__ import annotations

from axonn_ext.planner.memory.stage import Stage
from axonn_ext.planner.memory.states import FP32
from axonn_ext.spec.parallel import BUCKET_BYTES


def scatters(stage: Stage) -> int:
    """Returns the buffers of weight gradients that are being summed over z.

    Each sum needs the whole gradient, which is sent, and as much again for what arrives from the
    other ranks.
    """
    if stage.overlap is None or stage.z == 1:
        return 0
    rounds, rest = divmod(stage.overlap.deferred + 1, 4)
    elements = min(rounds * stage.size.block + stage.size.runs[rest],
                   stage.layers * stage.size.block)  # fmt: skip
    return 2 * elements * stage.width // (stage.x * stage.y)


def table_sum(stage: Stage) -> int:
    """Returns the bytes that the gradient of the embedding's table and its sum over z take."""
    table, part = stage.table, stage.table // stage.z
    if stage.z == 1:
        return table
    if stage.overlap is None:
        return table // stage.width * stage.sum_width
    arrived = table if stage.tied else 2 * table
    return arrived + part // stage.width * (FP32 + stage.wide)


def full_buckets(stage: Stage) -> int:
    """Returns by how many bytes the buckets that are summed during backward exceed gradients.

    There are such buckets only with overlap, and at most two at a time. A bucket is in fp32,
    and replaces the gradients that it holds. ZeRO's are counted by divided.py.
    """
    if stage.num_parts > 1:
        return 0
    if stage.overlap is None or not stage.wide:
        return 0
    bucket_bytes = stage.overlap.bucket_bytes
    full = stage.elements.left_early * stage.width // bucket_bytes
    return min(full, 2) * bucket_bytes // stage.width * (FP32 - stage.width)


def sums(stage: Stage) -> int:
    """Returns the buffers of the sums of gradients after backward.

    With overlap, these are a bucket in fp32 that is being filled, and one that is summed and
    replaces its gradients. Without overlap, they are a bucket and its sum, and on the CPU as much
    again for the collective's copies. The previous bucket is held until the next one exists, and
    its sum until the next sum exists.
    """
    left = stage.elements.left * stage.width
    if left == 0:
        return 0
    limit = BUCKET_BYTES if stage.overlap is None else stage.overlap.bucket_bytes
    bucket = max(min(left, limit), stage.elements.largest_left * stage.width)
    following = min(bucket, left - bucket)
    if stage.overlap is not None:
        return (bucket * FP32 + following * (FP32 - stage.width)) // stage.width
    if not stage.copy:
        return 2 * bucket + following
    return max(4 * bucket, bucket + 4 * following)


def wide_gradients(stage: Stage) -> int:
    """Returns the fp32 copies of low-precision gradients that the gradient norm and AdamW make.

    The norm's copies are freed before AdamW makes its own.
    """
    return stage.elements.own * stage.wide
