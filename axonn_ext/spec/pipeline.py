"""Schedules of a pipeline: which task a stage runs when.

A pipeline has `stages` ranks. Each holds `chunks` blocks of layers (one unless the schedule is
interleaved); block c of stage s is the virtual stage c * stages + s, and the virtual stages in
order form the model. A micro-batch runs forward through all of them, then backward.

Sources: GPipe (arXiv:1811.06965), 1F1B and its interleaved form (arXiv:2104.04473, section 2.2),
zero bubble (arXiv:2401.10241, section 2, schedule ZB-H1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from axonn_ext.spec.parallel import check_choice

SCHEDULES = ("message_driven", "1f1b", "gpipe", "interleaved", "zero_bubble")
FIXED_SCHEDULES = SCHEDULES[1:]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a stage.

    kind         "forward"; "backward": both gradients, or only the input gradient if weight
                 gradients are deferred; "weight": the weight gradients of a deferred backward
    chunk        the number of the block of layers on this rank, 0 unless interleaved
    micro_batch  the number of the micro-batch
    """

    kind: str
    chunk: int
    micro_batch: int


def fixed_order(
    schedule: str, *, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[Task, ...]:
    """The tasks of one stage, in the order in which it runs them, whenever messages arrive.

    Each task occurs once, backward after forward, and the tasks of a kind and chunk are in
    ascending order of micro-batch, so that gradients are always added in this order. The orders of
    all stages cannot deadlock. Messages are received in the order in which they are sent, on each
    channel.

        gpipe        all forwards, then all backwards
        1f1b         stages - stage - 1 forwards, then forwards and backwards alternate
        interleaved  the same over chunks: each runs `stages` micro-batches, then the next chunk
        zero_bubble  1f1b, whose weight gradients follow `stage` micro-batches late; a stage holds
                     at most as many micro-batches as stage 0 of 1f1b

    Raises ValueError for a schedule without a fixed order, numbers below their minimum, more than
    one chunk unless interleaved, and, for interleaved, micro-batches that stages do not divide.
    """
    check_choice("schedule", schedule, FIXED_SCHEDULES)
    check_sizes(schedule, stages=stages, micro_batches=micro_batches, chunks=chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"stage must be from 0 to {stages - 1}, got {stage}")
    later = stages - stage - 1
    if schedule == "gpipe":
        return tuple(_alternate(stages, micro_batches, chunks, warm_up=micro_batches))
    if schedule == "interleaved":
        warm_up = 2 * later + (chunks - 1) * stages
        return tuple(_alternate(stages, micro_batches, chunks, warm_up=warm_up))
    tasks = _alternate(stages, micro_batches, chunks, warm_up=later)
    return tuple(tasks if schedule == "1f1b" else _with_weights(tasks, micro_batches, late=stage))


def check_sizes(schedule: str, *, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Raises ValueError, which names the numbers, for sizes that a schedule does not support."""
    check_choice("schedule", schedule, SCHEDULES)
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if schedule != "interleaved":
        if chunks != 1:
            raise ValueError(f"schedule {schedule!r} has one chunk per stage, got chunks={chunks}")
        return
    if chunks == 1:
        raise ValueError("schedule 'interleaved' needs chunks >= 2, got chunks=1")
    if micro_batches % stages:
        raise ValueError(
            f"schedule 'interleaved' needs micro-batches that are a multiple of the stages, "
            f"got {micro_batches} micro-batches on {stages} stages"
        )


def _alternate(stages: int, micro_batches: int, chunks: int, *, warm_up: int) -> Iterator[Task]:
    """Yields the forwards of a warm-up, then alternating forwards and backwards, then backwards."""
    pairs = list(_chunk_order(stages, micro_batches, chunks))
    for position in range(len(pairs) + warm_up):
        if position < len(pairs):
            yield Task("forward", *pairs[position])
        if 0 <= position - warm_up < len(pairs):
            chunk, micro_batch = pairs[position - warm_up]
            yield Task("backward", chunks - 1 - chunk, micro_batch)


def _chunk_order(stages: int, micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yields (chunk, micro-batch) in the order of forwards. Backwards count chunks from the last.

    `stages` micro-batches run through a chunk before the next chunk's turn.
    """
    if chunks == 1:
        yield from ((0, micro_batch) for micro_batch in range(micro_batches))
        return
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            yield from ((chunk, first + number) for number in range(stages))


def _with_weights(tasks: Iterator[Task], micro_batches: int, *, late: int) -> Iterator[Task]:
    """Yields the tasks, and after each backward the weight task of `late` micro-batches ago.

    The last backward of stage s leaves s + 1 weight tasks. They fill the time in which the earlier
    stages, which have fewer of them left, still run their last backwards.
    """
    for task in tasks:
        yield task
        if task.kind == "backward" and task.micro_batch >= late:
            yield Task("weight", 0, task.micro_batch - late)
    for micro_batch in range(max(micro_batches - late, 0), micro_batches):
        yield Task("weight", 0, micro_batch)


def bubble_seconds(
    schedule: str,
    *,
    stages: int,
    forward: float,
    backward: float,
    weight: float,
    chunks: int = 1,
) -> float:
    """The seconds of a step in which a stage idles, if all stages are alike and messages are free.

    forward, backward (input gradient), weight: the seconds of a stage, over all of its chunks, for
    one micro-batch. A step takes this plus micro_batches * (forward + backward + weight). Exact for
    1f1b, gpipe and interleaved; for zero_bubble if weight is at most forward and at most backward,
    and there are at least as many micro-batches as stages. Otherwise it takes longer.

    Source: arXiv:2104.04473, section 2.2; arXiv:2401.10241, table 2.
    """
    check_choice("schedule", schedule, FIXED_SCHEDULES)
    check_sizes(schedule, stages=stages, micro_batches=stages, chunks=chunks)
    if schedule == "zero_bubble":
        return (stages - 1) * (forward + backward - weight)
    return (stages - 1) * (forward + backward + weight) / chunks
