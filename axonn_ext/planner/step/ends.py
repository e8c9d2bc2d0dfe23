"""The tasks before the first block and after the last one: embedding, last norm, head and loss."""

from __future__ import annotations

from axonn_ext.planner.step.blocks import norm
from axonn_ext.planner.step.linears import (
    collective_of_weight,
    linear_backward,
    linear_forward,
    summed_bytes,
    whole_elements,
)
from axonn_ext.planner.step.rank import FP32, Rank, present
from axonn_ext.planner.step.tasks import Collective, Task


def embedding_forward(rank: Rank) -> tuple[Task, ...]:
    """Returns the look-up of the tokens' rows."""
    elements = rank.m * rank.model.hidden_size // rank.size["y"]
    after = rank.collective(rank.sums, "x", elements, rank.width, "activations")
    return (
        Task(
            "embedding", after=present([after]), gather=_table(rank, "all_gather"),
            touched_bytes=3 * elements * rank.width,
        ),
    )  # fmt: skip


def embedding_backward(rank: Rank) -> tuple[Task, ...]:
    """Returns the sum of the rows' gradients."""
    shard = rank.m_x * rank.model.hidden_size // rank.size["y"]
    gather = None
    if rank.options.sharded:
        gather = rank.collective("all_gather", "x", shard, rank.width, "activations")
    block = whole_elements(rank, rank.model.head)
    return (
        Task(
            "embedding backward", before=present([gather]),
            scatter=_table(rank, "reduce_scatter"),
            touched_bytes=(2 * shard + 2 * block) * rank.width
            + summed_bytes(rank, rank.model.head),
        ),
    )  # fmt: skip


def _table(rank: Rank, kind: str) -> Collective | None:
    """Returns a collective of the table, which always has the layout of lm_head's weight."""
    return collective_of_weight(rank, rank.model.head, kind)


def last_forward(rank: Rank) -> tuple[Task, ...]:
    """Returns the forward pass of the last norm, the head and the loss."""
    gathers = _head_gathers(rank) or rank.in_stages
    head = linear_forward(rank, rank.model.head, gathers=gathers)
    return (norm(rank, "norm", backward=False), head, _loss(rank))


def last_backward(rank: Rank) -> tuple[Task, ...]:
    """Returns the backward pass of the head and the last norm."""
    head = linear_backward(
        rank, rank.model.head, gathers=_head_gathers(rank),
        scatters=rank.in_stages or not rank.model.tie_embeddings,
    )  # fmt: skip
    return (*head, norm(rank, "norm", backward=True))


def _head_gathers(rank: Rank) -> bool:
    """Whether lm_head gathers its weight itself.

    A tied table is gathered once per micro-batch, for the embedding (in a pipeline, whose last
    stage has no embedding, for lm_head). With overlap it is gathered like other weights, at
    each use unless it is held.
    """
    return not rank.model.tie_embeddings or rank.options.overlap is not None


def _loss(rank: Rank) -> Task:
    """Returns the loss: three numbers per row cross x, and one in total crosses the row axes.

    In a pipeline, the latter crosses once per step, in a group of all ranks that is not counted.
    """
    row_axes = () if rank.in_stages else _row_axes(rank)
    before = [rank.collective("all_reduce", "x", n * rank.m_y, FP32, "loss") for n in (1, 2)]
    after = [rank.collective("all_reduce", axis, 1, FP32, "loss") for axis in row_axes]
    logits = rank.m_y * rank.model.vocab_size // rank.size["x"]
    return Task(
        "loss", before=present(before), after=present(after),
        # Forward reads the logits; backward reads them again and writes the gradient over them.
        touched_bytes=3 * logits * rank.width,
    )  # fmt: skip


def _row_axes(rank: Rank) -> tuple[str, ...]:
    """The axes that split the rows of logits."""
    return ("y", "z", "data") if rank.options.sharded else ("z", "data")
