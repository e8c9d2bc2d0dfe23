"""The bytes that a step sends along each axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from axonn_ext.planner.job import Job
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.planner.step.tasks import Collective, Program


def most_bytes_by_axis(job: Job) -> dict[str, int]:
    """Returns, for each axis of several ranks, the bytes that a rank sends along it in a step.

    If stages send different numbers, the largest one of each axis counts.
    """
    most: dict[str, int] = {}
    first_of_its_kind = {share: stage for stage, share in reversed([*enumerate(shares_of(job))])}
    for stage in first_of_its_kind.values():
        for axis, num_bytes in bytes_by_axis(make_program(job, stage)).items():
            most[axis] = max(num_bytes, most.get(axis, 0))
    return most


def bytes_by_axis(program: Program) -> dict[str, int]:
    """Returns the bytes that a rank sends along each axis of several ranks in a step.

    With Muon, the rank is one of the first of data, which orthogonalise the most matrices. Between
    stages, activations, their gradients and sums count. Other pipeline traffic (the shapes of first
    messages, decisions of message_driven, and totals of all ranks) does not.
    """
    total: Counter[str] = Counter()
    for c, times in all_collectives(program):
        total[c.axis] += c.num_bytes * times
    return {axis: n for axis, n in total.items() if n}


def all_collectives(program: Program) -> Iterator[tuple[Collective, int]]:
    """Yields every collective and message of a step, and how often it is issued."""
    parts = program.num_micro_batches
    for c in (*program.messages, *program.sums_in_each):
        yield c, parts
    for tasks, repeats in program.micro_batch():
        for task in tasks:
            for c in task.collectives():
                yield c, repeats * parts
    optimizer = program.optimizer
    for tasks, times in optimizer.matrices:
        for task in tasks:
            for c in task.collectives():
                yield c, times
    sums = (*program.gradient_sums, *program.norm_sums)
    for c in (*sums, *optimizer.sent, *optimizer.gathers):
        yield c, 1
