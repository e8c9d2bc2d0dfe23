"""Describes a step of one rank: every product and collective, in the order of execution.

Volumes, times and timelines are all computed from this description. It follows the modules of
`axonn_ext.nn` and `axonn_ext.models`; tests compare it, byte for byte, with what they issue.

On a grid with pipe > 1, ranks of different stages have different steps; each function takes the
pipe coordinate `stage`.
"""

from __future__ import annotations

from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.step.blocks import block_backward, block_forward
from axonn_ext.planner.step.ends import (
    embedding_backward,
    embedding_forward,
    last_backward,
    last_forward,
)
from axonn_ext.planner.step.gradients import (
    gradient_sums,
    norm_sums,
    order_checks,
    sum_over_ends,
)
from axonn_ext.planner.step.messages import messages, received
from axonn_ext.planner.step.optimizer import bucket_sums, optimizer_work
from axonn_ext.planner.step.rank import Rank
from axonn_ext.planner.step.tasks import Parts, Program, Task


def make_program(job: Job, stage: int = 0) -> Program:
    """Returns the step of a legal job on a pipe coordinate.

    With overlap, every use of a weight has a gather; the schedule omits those of weights that are
    still held.
    """
    rank = Rank(job, stage)
    in_buckets = tuple(bucket_sums(rank))
    in_each = job.options.optimizer.zero > 1  # micro-batch
    return Program(
        _parts_of(rank),
        num_layers=rank.share.num_layers,
        recomputation=rank.options.recomputation,
        num_micro_batches=job.options.micro_batches,
        messages=messages(rank),
        sums_in_each=in_buckets if in_each else (),
        gradient_sums=(
            *gradient_sums(rank),
            *(() if in_each else in_buckets),
            *order_checks(rank),
            *sum_over_ends(rank),
        ),
        norm_sums=norm_sums(rank),
        optimizer=optimizer_work(rank),
    )


def _parts_of(rank: Rank) -> Parts:
    forward, ends = block_forward(rank), ends_of(rank)
    again: tuple[Task, ...] = ()
    if rank.options.recomputation.blocks:
        again = (*forward, *block_backward(rank, recomputed=True))
    return Parts(
        ends.first_forward, forward, ends.last_forward,
        ends.last_backward, block_backward(rank), again, ends.first_backward,
    )  # fmt: skip


class Ends(NamedTuple):
    """The parts of a micro-batch before the first block and after the last one; see Parts."""

    first_forward: tuple[Task, ...]
    last_forward: tuple[Task, ...]
    last_backward: tuple[Task, ...]
    first_backward: tuple[Task, ...]


def ends_of(rank: Rank) -> Ends:
    """Returns a rank's work in a micro-batch outside the blocks."""
    has_first, has_last = rank.share.has_first, rank.share.has_last
    return Ends(
        (*(embedding_forward(rank) if has_first else ()), *received(rank, "activations")),
        last_forward(rank) if has_last else (),
        (*received(rank, "gradients"), *(last_backward(rank) if has_last else ())),
        embedding_backward(rank) if has_first else (),
    )


def has_table(program: Program) -> bool:
    """Returns whether the program gathers a table over z, the embedding's or the head's."""
    ends = (*program.parts.first_forward, *program.parts.last_forward)
    return any(task.gather is not None for task in ends)
