"""Says which weights a rank may hold gathered from one use to the next if overlap is on.

Source: csrc/core/overlap/orchestrator_gathers.cpp. The weight that is needed last is evicted first,
so at the turn between two passes a rank holds the weights that were used last and are needed first.
"""

from __future__ import annotations

from axonn_ext.planner.job import Job


def held_share(job: Job, num_layers: int, *, has_table: bool) -> float:
    """Returns the share of its blocks' weights that Overlap.gathered_bytes lets a rank hold.

    num_layers: the rank's number of blocks. has_table: whether it also uses a table, of the
    embedding or the head, at the turns between passes.
    """
    overlap = job.options.overlap
    if overlap is None or job.grid.z == 1:
        return 0.0
    left = overlap.gathered_bytes - (table_bytes(job) if has_table else 0)
    return min(1.0, max(0, left) / (block_bytes(job) * num_layers))


def held_after_recomputation(job: Job) -> tuple[bool, ...]:
    """Returns, for each Linear of a recomputed block, whether backward finds its weight gathered.

    The recomputation has gathered all of them in their order, and backward needs them in reverse.
    """
    overlap = job.options.overlap
    budget = 0 if overlap is None else overlap.gathered_bytes
    split = job.grid.x * job.grid.y
    held, needed = [], 0
    for i, linear in enumerate(reversed(job.model.block_linears)):
        needed += linear.n * linear.k * job.options.width // split
        # With overlap, the first weight of backward is already in use.
        held.append(overlap is not None and (i == 0 or needed <= budget))
    return tuple(reversed(held))


def share_gathered_again(job: Job) -> float:
    """Returns the share of a recomputed block's weights that its backward gathers again."""
    linears = job.model.block_linears
    held = held_after_recomputation(job)
    again = sum(w.n * w.k for w, is_held in zip(linears, held, strict=True) if not is_held)
    return again / sum(w.n * w.k for w in linears)


def table_is_held(job: Job) -> bool:
    """Returns whether a tied table stays gathered from the embedding to lm_head and backward.

    No stage of a pipeline has both.
    """
    overlap = job.options.overlap
    if overlap is None or not job.model.tie_embeddings or job.grid.pipe > 1:
        return False
    return table_bytes(job) <= overlap.gathered_bytes


def block_bytes(job: Job) -> float:
    """Returns the bytes of one block's weights, gathered over z."""
    elements = sum(w.n * w.k for w in job.model.block_linears)
    return elements * job.options.width / (job.grid.x * job.grid.y)


def table_bytes(job: Job) -> float:
    """Returns the bytes of a table of the embedding or the head, gathered over z."""
    head = job.placed_model.head
    return head.n * head.k * job.options.width / (job.grid.x * job.grid.y)
