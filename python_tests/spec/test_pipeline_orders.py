"""The orders of pipeline stages, and the split of layers into stages."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.pipeline import (
    FIXED_SCHEDULES,
    SCHEDULES,
    Task,
    bubble_seconds,
    check_sizes,
    fixed_order,
)
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.stages import Stages

Orders = list[tuple[Task, ...]]
Case = tuple[str, int, int, int]  # schedule, stages, micro-batches, chunks


def cases() -> Iterator[Case]:
    for stages, micro_batches in itertools.product(range(1, 9), (1, 2, 3, 5, 8, 12, 24)):
        for schedule in ("1f1b", "gpipe", "zero_bubble"):
            yield schedule, stages, micro_batches, 1
    for stages, rounds, chunks in itertools.product(range(1, 7), (1, 2, 3, 5), (2, 3, 4)):
        yield "interleaved", stages, rounds * stages, chunks


CASES = list(cases())


def orders_of(case: Case) -> Orders:
    schedule, stages, micro_batches, chunks = case
    return [
        fixed_order(
            schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks
        )
        for stage in range(stages)
    ]


def letters(order: Sequence[Task]) -> str:
    return " ".join(f"{t.kind[0].upper()}{t.chunk or ''}{t.micro_batch}" for t in order)


def deadlocks(orders: Orders, chunks: int) -> bool:
    """Whether stages that run their orders with blocking receives never end.

    Each link is a queue of unnamed messages, so they must arrive in the order they are needed.
    """
    stages = len(orders)
    last = stages * chunks - 1
    links: dict[tuple[str, int], deque[tuple[int, int]]] = {}  # (kind, receiving rank) -> messages
    position = [0] * stages
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                task = order[position[stage]]
                virtual = task.chunk * stages + stage
                starts = virtual == 0 if task.kind == "forward" else virtual == last
                if task.kind != "weight" and not starts:
                    link = links.setdefault((task.kind, stage), deque())
                    if not link:
                        break
                    assert link.popleft() == (virtual, task.micro_batch)
                receiver = {"forward": virtual + 1, "backward": virtual - 1}.get(task.kind, -1)
                if 0 <= receiver <= last:
                    link = links.setdefault((task.kind, receiver % stages), deque())
                    link.append((receiver, task.micro_batch))
                position[stage] += 1
                progress = True
    return position != [len(order) for order in orders]


@pytest.mark.parametrize("schedule", FIXED_SCHEDULES)
def test_every_task_once_and_in_ascending_order(schedule: str) -> None:
    kinds = ("forward", "backward") + (("weight",) if schedule == "zero_bubble" else ())
    for case in CASES:
        if case[0] != schedule:
            continue
        _, _, micro_batches, chunks = case
        for order in orders_of(case):
            assert len(order) == len(kinds) * chunks * micro_batches, case
            for kind, chunk in itertools.product(kinds, range(chunks)):
                found = [t.micro_batch for t in order if (t.kind, t.chunk) == (kind, chunk)]
                assert found == list(range(micro_batches)), (case, kind, chunk)
            at = {task: position for position, task in enumerate(order)}
            for first, second in itertools.pairwise(kinds):
                for chunk, number in itertools.product(range(chunks), range(micro_batches)):
                    earlier, later = Task(first, chunk, number), Task(second, chunk, number)
                    assert at[earlier] < at[later], (case, later)


def test_no_orders_deadlock() -> None:
    for case in CASES:
        assert not deadlocks(orders_of(case), case[3]), case


def test_a_deadlock_would_be_found() -> None:
    """Stage 0 waits for the first backward before its second forward, and stage 1 for both."""
    second = fixed_order("gpipe", stages=2, stage=1, micro_batches=2)
    assert deadlocks([fixed_order("1f1b", stages=2, stage=1, micro_batches=2), second], 1)


def test_small_orders_are_those_of_the_papers() -> None:
    def order(schedule: str, stage: int, micro_batches: int = 3, **sizes: int) -> str:
        return letters(
            fixed_order(
                schedule, stages=sizes.pop("stages", 3), stage=stage,
                micro_batches=micro_batches, **sizes,
            )
        )  # fmt: skip

    assert order("gpipe", 1) == "F0 F1 F2 B0 B1 B2"
    assert order("1f1b", 0) == "F0 F1 F2 B0 B1 B2"
    assert order("1f1b", 1) == "F0 F1 B0 F2 B1 B2"
    assert order("1f1b", 2) == "F0 B0 F1 B1 F2 B2"
    assert order("1f1b", 0, 1) == "F0 B0"  # fewer micro-batches than stages
    assert order("zero_bubble", 0) == "F0 F1 F2 B0 W0 B1 W1 B2 W2"
    assert order("zero_bubble", 1) == "F0 F1 B0 F2 B1 W0 B2 W1 W2"
    assert order("zero_bubble", 2) == "F0 B0 F1 B1 F2 B2 W0 W1 W2"
    # Megatron-LM, two stages of two chunks; "F12" is the forward of chunk 1, micro-batch 2.
    assert order("interleaved", 0, 4, stages=2, chunks=2) == (
        "F0 F1 F10 F11 F2 B10 F3 B11 F12 B0 F13 B1 B12 B13 B2 B3"
    )
    assert order("interleaved", 1, 4, stages=2, chunks=2) == (
        "F0 F1 F10 B10 F11 B11 F2 B0 F3 B1 F12 B12 F13 B13 B2 B3"
    )


def test_wrong_sizes_are_refused_with_their_numbers() -> None:
    def order(schedule: str, **changes: int) -> None:
        sizes = {"stages": 4, "stage": 0, "micro_batches": 8} | changes
        fixed_order(schedule, **sizes)

    for schedule in ("message_driven", "other"):
        with pytest.raises(ValueError, match=f"1f1b, gpipe.*got '{schedule}'"):
            order(schedule)
    with pytest.raises(ValueError, match=r"must be one of message_driven, .*'other'"):
        check_sizes("other", stages=1, micro_batches=1)
    for name in ("stages", "micro_batches", "chunks"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            order("1f1b", **{name: 0})
    for stage in (-1, 4):
        with pytest.raises(ValueError, match=f"stage must be from 0 to 3, got {stage}"):
            order("gpipe", stage=stage)
    with pytest.raises(ValueError, match="'gpipe' has one chunk per stage, got chunks=2"):
        order("gpipe", chunks=2)
    with pytest.raises(ValueError, match="needs chunks >= 2, got chunks=1"):
        order("interleaved")
    with pytest.raises(ValueError, match="got 10 micro-batches on 4 stages"):
        order("interleaved", micro_batches=10, chunks=2)


def test_twice_as_many_micro_batches_in_flight_as_1f1b() -> None:
    assert [PipelineOptions().most_in_flight(4, stage) for stage in range(4)] == [8, 6, 4, 2]


def test_bubbles_of_four_stages() -> None:
    def bubble(schedule: str, chunks: int = 1) -> float:
        return bubble_seconds(
            schedule, stages=4, forward=1.0, backward=2.0, weight=1.5, chunks=chunks
        )

    assert set(SCHEDULES) - set(FIXED_SCHEDULES) == {"message_driven"}
    assert bubble("1f1b") == bubble("gpipe") == 13.5
    assert bubble("zero_bubble") == 4.5
    assert bubble("interleaved", 3) == 4.5
    with pytest.raises(ValueError, match="got 'message_driven'"):
        bubble("message_driven")


# --- Split of layers -----------------------------------------------------------------------------


def sizes_of(*split: int, **head: int) -> list[int]:
    return [len(blocks) for blocks in Stages.split(*split, **head).blocks]


def test_no_split_has_a_cheaper_largest_part() -> None:
    """Compares with all splits, by the whole rule: largest part, squares, then sizes."""
    for num_layers, head in itertools.product(range(2, 10), range(12)):
        for parts in range(2, num_layers + 1):
            every = []
            for cuts in itertools.combinations(range(1, num_layers), parts - 1):
                sizes = [b - a for a, b in itertools.pairwise((0, *cuts, num_layers))]
                costs = [*sizes[:-1], sizes[-1] + head]
                every.append((max(costs), sum(cost * cost for cost in costs), sizes))
            assert sizes_of(num_layers, parts, head=head) == min(every)[2]


def test_equal_layers_leave_the_early_stages_fewer() -> None:
    assert sizes_of(10, 4) == [2, 2, 3, 3]
    assert sizes_of(12, 2, 2, head=1) == [3, 3, 3, 3]
    assert sizes_of(14, 4, head=3) == [4, 4, 4, 2]  # the head counts, too
    assert sizes_of(7) == [7]
    assert sizes_of(10**12, 3, head=1) == [333333333333, 333333333334, 333333333333]


def test_a_head_that_costs_part_of_a_layer_counts() -> None:
    model = ModelConfig(vocab_size=16, hidden_size=64, num_layers=4, num_heads=4, sequence_length=8)
    assert 0 < model.head_flops_per_token() < model.block_flops_per_token()
    stages = Stages.balanced(model, pipe=3)
    assert [len(blocks) for blocks in stages.blocks] == [1, 2, 1]


def test_layers_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 parts"):
        Stages.split(3, 2, 2)
