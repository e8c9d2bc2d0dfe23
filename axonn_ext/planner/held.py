"""Says which weights a rank may hold gathered from one use to the next if overlap is on."""

from __future__ import annotations

from axonn_ext.planner.job import Job


def held_share(job: Job, num_layers: int) -> float:
    """Returns the share of its blocks' weights that Overlap.gathered_bytes lets a rank hold.

    num_layers: the blocks that the rank has.
    """
    if job.options.overlap is None or job.grid.z == 1:
        return 0.0
    return min(1.0, job.options.overlap.gathered_bytes / (_block_bytes(job) * num_layers))


def block_is_held(job: Job) -> bool:
    """Returns whether all weights of a block may be held gathered at once."""
    overlap = job.options.overlap
    return overlap is not None and _block_bytes(job) <= overlap.gathered_bytes


def table_is_held(job: Job) -> bool:
    """Returns whether a tied table stays gathered from the embedding to lm_head and backward.

    No stage of a pipeline has both.
    """
    head, overlap = job.placed_model.head, job.options.overlap
    if overlap is None or not job.model.tie_embeddings or job.grid.pipe > 1:
        return False
    return head.n * head.k * job.options.width <= overlap.gathered_bytes * job.grid.x * job.grid.y


def _block_bytes(job: Job) -> float:
    """Returns the bytes of one block's weights, gathered over z."""
    elements = sum(w.n * w.k for w in job.model.block_linears)
    return elements * job.options.width / (job.grid.x * job.grid.y)
