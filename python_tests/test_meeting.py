"""How ranks compare values: their errors if they differ, and their calls of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from axonn_ext.ranks import meeting
from axonn_ext.ranks.meeting import (
    RanksDiffer,
    RanksFailed,
    RanksMissing,
    meet,
    name_ranks,
    said_by_all,
)
from axonn_ext.spec import settings
from counting_store import CountingStore
from limits import HANG_SECONDS

PATIENCE = timedelta(seconds=HANG_SECONDS)
Values = Mapping[str, str] | None


def all_meet(
    values: list[Values], store: Callable[[], Store] | None = None
) -> list[BaseException | None]:
    """The error that each rank raises if the ranks have these values."""
    size, shared = len(values), HashStore()
    raised: list[BaseException | None] = [TimeoutError()] * size

    def rank(number: int) -> None:
        try:
            own = shared if store is None else store()
            meet(own, number, range(size), values[number], patience=PATIENCE)
            raised[number] = None
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return raised


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        (
            [{"lr": "0.001", "k": "1"}, {"lr": "0.05", "k": "1"}],
            ["lr is 0.05 on rank 1, but 0.001 on rank 0"],
        ),
        (
            [{"lr": "2"}, {"lr": "5"}, *[{"lr": "2"}] * 6],
            ["lr is 5 on rank 1, but 2 on ranks 0, 2-7"],
        ),
        (
            [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}, {"a": "1"}, {"a": "1"}],
            [
                "a is 2 on rank 1, but 1 on ranks 0, 2, 3",
                "b is x on rank 0, y on rank 1, but not set on ranks 2, 3",
            ],
        ),
        (
            [{"a": "x" * 500 + "1" * 500}, {"a": "x" * 500 + "2" * 500}],
            [
                f"a is ... {'x' * 20}{'2' * 80} ... on rank 1, but "
                f"... {'x' * 20}{'1' * 80} ... on rank 0"
            ],
        ),
    ],
)
def test_all_ranks_name_what_differs_and_where(values: list[Values], problems: list[str]) -> None:
    for error in all_meet(values):
        assert isinstance(error, RanksDiffer)
        assert error.problems == problems


def test_a_message_is_bounded_however_many_differ() -> None:
    size = 24
    values = [{f"key {i}": str(rank) for i in range(50)} for rank in range(size)]
    errors = {str(error) for error in all_meet([*values])}
    [text] = errors
    assert len(text.splitlines()) == meeting.MOST_KEYS + 2
    assert f"ranks {meeting.MOST_SAID}-{size - 1} differ from these" in text


def test_ranks_that_say_the_same_meet_again_and_again() -> None:
    shared = HashStore()
    for number in range(5):
        values = {"number": str(number)}
        assert all_meet([values] * 3, lambda: shared) == [None] * 3


def test_a_rank_with_a_mistake_of_its_own_ends_the_wait() -> None:
    first, second, third = all_meet([{"a": "1"}, None, {"a": "1"}])
    assert second is None
    for error in (first, third):
        assert isinstance(error, RanksFailed) and error.ranks == "rank 1"


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RanksMissing, match=r"^Grid: no word of ranks 0, 2-7 after 0\.2 s"):
        meet(HashStore(), 1, range(8), {}, what="Grid", patience=timedelta(seconds=0.2))


def on_threads(texts: Mapping[int, str], size: int, seconds: float) -> dict[int, object]:
    """The result or error of said_by_all on the ranks that take part."""
    store, answers = HashStore(), {}

    def run(rank: int, text: str) -> None:
        patience = timedelta(seconds=seconds)
        try:
            answers[rank] = said_by_all(store, rank, range(size), text, patience=patience)
        except RanksMissing as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in texts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return answers


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_hear_what_all_say(size: int) -> None:
    texts = {rank: "even" if rank % 2 == 0 else "" for rank in range(size)}
    expected = [("even", [*range(0, size, 2)]), ("", [*range(1, size, 2)])]
    said = [group for group in expected if group[1]]
    assert on_threads(texts, size, HANG_SECONDS) == dict.fromkeys(range(size), said)


def test_ranks_that_do_not_come_are_named_everywhere() -> None:
    answers = on_threads({0: "", 1: "", 3: ""}, 5, 0.5)
    said = "no word of ranks 2, 4 after 0.5 s (AXONN_TIMEOUT_SECONDS)"
    assert answers == dict.fromkeys((0, 1, 3), said)


def test_one_rank_looks_who_is_missing() -> None:
    size, counts = 600, []
    shared = HashStore()
    for rank in (1, 0, 3):
        store = CountingStore(shared)
        with pytest.raises(RanksMissing, match="no word of ranks 0, 2-599 "):
            said_by_all(store, rank, range(size), "", patience=timedelta(seconds=0.1))
        counts.append(store.count)
    assert counts[0] > size and max(counts[1:]) <= 10


@pytest.mark.parametrize(("differs", "most"), [(False, 8), (True, 9)])
def test_a_rank_uses_the_store_as_often_whatever_their_number(differs: bool, most: int) -> None:
    """The exception is one rank, which reads all values if they differ."""
    for size in (2, 16):
        stores: list[CountingStore] = []
        shared = HashStore()

        def counting(shared: HashStore = shared, stores: list[CountingStore] = stores) -> Store:
            stores.append(CountingStore(shared))
            return stores[-1]

        raised = all_meet(
            [{"lr": str(int(differs and rank == 1))} for rank in range(size)], counting
        )
        assert [error is not None for error in raised] == [differs] * size
        counts = sorted(store.count for store in stores)
        assert max(counts[:-1] if differs else counts) <= most, size


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([1], "rank 1"), ([3, 2], "ranks 2, 3"), ([0, *range(2, 8), 9], "ranks 0, 2-7, 9")],
)
def test_names_of_ranks(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


def test_every_setting_is_shared_but_the_cache() -> None:
    shared = settings.load({"AXONN_EMULATED_LINKS": "x=2,y=0.5"}).shared()
    assert {*shared, "AXONN_CACHE_DIR"} == {
        line.split()[0] for line in (settings.__doc__ or "").splitlines() if line[:6] == "AXONN_"
    }
    assert shared["AXONN_EMULATED_LINKS"] == "x=2,y=0.5"
