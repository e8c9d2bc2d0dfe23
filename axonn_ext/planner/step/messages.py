"""The messages that the stages of a pipeline send to each other."""

from __future__ import annotations

from axonn_ext.planner.step.rank import Rank, present
from axonn_ext.planner.step.tasks import Collective, Task


def _shares_x(rank: Rank) -> bool:
    """Whether each rank of x sends a part of the rows, which are equal on all of them."""
    return not rank.options.sharded and rank.m % rank.size["x"] == 0


def _message_elements(rank: Rank) -> int:
    rows = rank.m_x // rank.size["x"] if _shares_x(rank) else rank.m_x
    return rows * rank.model.hidden_size // rank.size["y"]


def messages(rank: Rank) -> tuple[Collective, ...]:
    """Returns what a rank sends to its neighbours for each micro-batch."""
    num_bytes = _message_elements(rank) * rank.width
    return (
        *[Collective("pipe", "send", num_bytes, "activations")] * rank.share.forward_sends,
        *[Collective("pipe", "send", num_bytes, "gradients")] * rank.share.backward_sends,
    )


def received(rank: Rank, what: str) -> tuple[Task, ...]:
    """Returns the gathers of received messages that are split over x.

    what: "activations" or "gradients".
    """
    if not _shares_x(rank) or rank.size["x"] == 1:
        return ()
    share = rank.share
    count = share.backward_sends if what == "activations" else share.forward_sends
    gather = rank.collective("all_gather", "x", _message_elements(rank), rank.width, what)
    return (Task(f"receive {what}", before=present([gather])),) * count
