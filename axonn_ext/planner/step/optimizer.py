"""The optimizer's step: its memory traffic, its transfers to the host, and ZeRO's collectives.

The optimizer is axonn_ext.optim.AdamW. With ZeRO or offload, it updates bucket by bucket. With
axonn_ext.optim.Muon (step/muon.py), it updates all but the matrices of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_ext.planner.step.muon import (
    matrix_bytes,
    matrix_elements,
    matrix_sums,
    matrix_updates,
    orthogonalisations,
    owned_by,
    sent_updates,
)
from axonn_ext.planner.step.parameters import buckets_of_groups, groups_of, parameters_of_rank
from axonn_ext.planner.step.rank import FP32, Rank, present
from axonn_ext.planner.step.tasks import Collective, OptimizerWork, Update
from axonn_ext.spec.buckets import BucketSizes


def bucket_sums(rank: Rank) -> Iterator[Collective]:
    """Yields the sums of ZeRO's buckets: reduce-scatters over data, in the gradients' dtype.

    Buckets of gradients that backward has not summed over other axes are first all-reduced over
    these in fp32. Source: axonn_ext/optim/zero/shards.py.
    """
    if rank.num_parts == 1:
        return
    for axes, sizes in _buckets(rank):
        for numel in sizes.each():
            for axis in axes:
                yield from present([rank.collective("all_reduce", axis, numel, FP32, "gradients")])
            yield from present(
                [rank.collective("reduce_scatter", "data", numel, rank.width, "gradients")]
            )
    if rank.options.optimizer.is_muon:
        yield from matrix_sums(rank)


def optimizer_work(rank: Rank) -> OptimizerWork:
    """Returns what clipping and AdamW do.

    Clipping reads the gradients for their norm, and scales them. AdamW reads parameter,
    gradient and two moments in fp32, and writes all but the gradient. In low precision, the
    gradient is first cast to fp32, and the parameter is cast back at the end.
    """
    width, casts = rank.width, 0 if rank.width == FP32 else 2 * (rank.width + FP32)
    muon = rank.options.optimizer.is_muon
    matrices = orthogonalisations(rank) if muon else ()
    if not rank.job.updates_in_buckets:
        own = parameters_of_rank(rank.job, rank.stage)
        others = own - matrix_elements(rank) if muon else own
        touched = others * (7 * FP32 + casts) + own * 3 * width
        if not muon:
            return OptimizerWork(touched, ())
        return OptimizerWork(touched + matrix_bytes(rank), (), matrices, tuple(sent_updates(rank)))
    buckets = _buckets(rank)
    numels = [numel for _, sizes in buckets for numel in sizes.each()]
    update_of = {numel: _update(rank, numel) for numel in set(numels)}
    kept = sum(sizes.total for _, sizes in buckets) // rank.num_parts
    updates = tuple(update_of[numel] for numel in numels)
    if muon:
        kept += sum(owned_by(rank.model, rank.job.grid, rank.share.num_layers).parts)
        updates = (*matrix_updates(rank), *updates)
    return OptimizerWork(kept * width, updates, matrices)  # read for the norm


def _update(rank: Rank, numel: int) -> Update:
    """Returns the update of a bucket.

    AdamW reads and writes masters and moments in fp32. The gradient is widened and scaled before
    that on the device, and in the same pass on the host. With ZeRO, the shard is written to
    separate memory, and the gathered bucket is copied to the parameters.
    """
    part, width = numel // rank.num_parts, rank.width
    copied = 2 * numel * width if rank.num_parts > 1 else 0
    gather = rank.collective("all_gather", "data", part, width, "parameters")
    gather = gather if rank.num_parts > 1 else None
    if rank.options.optimizer.offload == "none":
        # The gradient: read and widened (unless fp32), scaled, and read by AdamW.
        widened = 0 if width == FP32 else width + FP32
        of_gradient = widened + 2 * FP32 + FP32
        return Update(part * (6 * FP32 + of_gradient + FP32 + width) + copied, 0, 0, gather)
    return Update(copied, part * (6 * FP32 + 2 * width), part * width, gather)


def _buckets(rank: Rank) -> list[tuple[tuple[str, ...], BucketSizes]]:
    groups = groups_of(
        rank.model, rank.job.grid, rank.share, rank.options, muon=rank.options.optimizer.is_muon
    )
    return buckets_of_groups(groups, rank.options.optimizer.bucket_elements, rank.num_parts)
