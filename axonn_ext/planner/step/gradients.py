"""The sums of gradients after the last micro-batch, and their norm."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_ext.planner.step.parameters import elements_of, parameters_by_axes
from axonn_ext.planner.step.rank import FP32, FP64, Rank, present
from axonn_ext.planner.step.tasks import Collective
from axonn_ext.spec.grid import SUM_ORDER
from axonn_ext.spec.parallel import BUCKET_BYTES

ORDER = "order"  # the ranks' order check, which is not a gradient


def gradient_sums(rank: Rank) -> Iterator[Collective]:
    """Yields the sums after backward of the gradients that every data rank gets whole.

    They are all-reduces of buckets, in the model's order. With overlap, a bucket is summed in fp32
    over one axis after the other. A bucket's gradients then depend on the order in which backward
    completes them; this changes the bytes by less than one element per bucket.
    """
    if rank.num_parts > 1:
        return
    overlap = rank.options.overlap
    width = rank.width if overlap is None else FP32
    bucket_bytes = BUCKET_BYTES if overlap is None else overlap.bucket_bytes
    parameters = list(parameters_by_axes(rank))
    for axis in (axis for axis in SUM_ORDER if rank.size[axis] > 1):
        elements = 0
        for count in (count for count, axes in parameters if axis in axes):
            if elements and (elements + count) * rank.width > bucket_bytes:
                yield from _sum_of_bucket(rank, axis, elements, width)
                elements = 0
            elements += count
        yield from _sum_of_bucket(rank, axis, elements, width)


def order_checks(rank: Rank) -> tuple[Collective, ...]:
    """Returns the checks, once per step, that all ranks have issued the same collectives.

    With overlap, each lane compares digests of 8 bytes; there is a lane for z, over which weights
    are gathered, and one for each axis of sums. Without overlap, ZeRO compares one number per
    parameter.
    """
    if rank.options.overlap is None:
        count = len(list(parameters_by_axes(rank))) if rank.num_parts > 1 else 0
        # Muon's matrices have sums of their own.
        apart = 4 * rank.share.num_layers if count and rank.options.optimizer.is_muon else 0
        counts = (count - apart, apart)
        return present(rank.collective("all_gather", "data", n, FP64, ORDER) for n in counts)
    used = {"z"}.union(*{axes for _, axes in parameters_by_axes(rank)})
    compared = (axis for axis in SUM_ORDER if axis in used)
    return present([rank.collective("all_gather", axis, 1, 8, ORDER) for axis in compared])


def sum_over_ends(rank: Rank) -> tuple[Collective, ...]:
    """Returns the sum of a tied table's gradient over the first and the last stage."""
    at_an_end = rank.share.has_first or rank.share.has_last
    if not (rank.in_stages and at_an_end and rank.model.tie_embeddings):
        return ()
    num_bytes = (
        elements_of(rank.job.grid, rank.model.head) * rank.width
    )  # each of two ranks sends it once
    return (Collective("pipe", "all_reduce", num_bytes, "gradients"),)


def norm_sums(rank: Rank) -> tuple[Collective, ...]:
    """Returns the sums for the norm of all gradients, which may be sharded over the data axis."""
    axes = (*(("data",) if rank.num_parts > 1 else ()), "x", "y", "z", "pipe")
    return present([rank.collective("all_reduce", a, 1, FP64, "grad norm") for a in axes])


def _sum_of_bucket(rank: Rank, axis: str, elements: int, width: int) -> tuple[Collective, ...]:
    return present([rank.collective("all_reduce", axis, elements, width, "gradients")])
