"""The name of a job's start, in a store that still has the keys of earlier starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from axonn_ext.ranks.launch.attempt import name_of_start
from axonn_ext.ranks.launch.place import Process
from limits import HANG_SECONDS


def start(store: HashStore, size: int, *, order: Sequence[int] = (0,)) -> set[str]:
    """The names that the ranks of a start get; the ranks in `order` come after the others."""
    names = {}

    def rank(number: int) -> None:
        time.sleep(0.1 * (order.index(number) + 1) if number in order else 0)
        names[number] = name_of_start(store, Process(number, size, size), HANG_SECONDS)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert len(names) == size
    return set(names.values())


def test_each_start_has_one_name_that_is_new() -> None:
    store = HashStore()
    names = [start(store, size, order=[late]) for size in (4, 4, 2, 4) for late in range(2)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == len(names)


@pytest.mark.parametrize(("number", "missing"), [(0, "1"), (1, "0")])
def test_a_rank_that_does_not_come_is_named(number: int, missing: str) -> None:
    store = HashStore()
    start(store, 2)
    with pytest.raises(TimeoutError, match=f"no word of rank {missing}"):
        name_of_start(store, Process(number, 2, 2), 0.3)


def test_a_start_that_ended_half_way_holds_nobody_up() -> None:
    store = HashStore()
    for came in range(3):
        with pytest.raises(TimeoutError):
            name_of_start(store, Process(came, 3, 3), 0.01)
        behind = [(came + 1) % 3]  # gets the next name
        assert len(start(store, 3, order=[came, *behind])) == 1
