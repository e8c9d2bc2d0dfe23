"""How ranks agree on a checkpoint: each rank's work in the store, and missing ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn
from torch.distributed import HashStore, Store, TCPStore

from axonn_ext import GridShape, checkpoint
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.checkpoint.errors import RanksMissing
from axonn_ext.checkpoint.layout import Layout, coords, grid_of
from axonn_ext.checkpoint.load import _load, _offering
from axonn_ext.checkpoint.manifest import StoredTensor
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.checkpoint.tables import agreed_tables
from limits import HANG_SECONDS


class Counting:
    """A rank's store, which counts the rank's calls, and the bytes sent and received."""

    def __init__(self, store: Store) -> None:
        self.store, self.count, self.num_bytes = store, 0, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def ask(*arguments: object) -> object:
            found = getattr(self.store, name)(*arguments)
            self.count += name != "check" or bool(found)  # failed checks are only polls
            self.num_bytes += sum(len(a) for a in (*arguments, found) if isinstance(a, bytes))
            return found

        return ask


def together(
    size: int, act: Callable[[Ranks], object], store: Store | None = None, *,
    absent: tuple[int, ...] = (),
) -> tuple[dict[int, object], dict[int, Counting]]:  # fmt: skip
    """Each rank's result, or the text of its CheckpointError; and the ranks' stores."""
    shared = store or HashStore()
    stores = {rank: Counting(shared) for rank in range(size) if rank not in absent}
    answers: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            answers[rank] = act(Ranks(rank, size, stores[rank]))
        except CheckpointError as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return answers, stores


def rounds(count: int) -> Callable[[Ranks], object]:
    def act(ranks: Ranks) -> object:
        for _ in range(count):
            found = ranks.reduced(1, lambda a, b: a + b)
        return found

    return act


def test_the_work_of_a_rank_does_not_grow_with_their_number() -> None:
    most = []
    for size in (17, 128, 512):  # from 17 ranks on, one has a parent and 8 children
        answers, stores = together(size, rounds(3))
        assert set(answers.values()) == {size}
        most.append(max(each.count for each in stores.values()))
        assert max(each.num_bytes for each in stores.values()) < 3 * 11 * 40
    assert len(set(most)) == 1 and most[0] <= 3 * 20


def test_what_ranks_say_does_not_stay_in_the_store() -> None:
    counts = []
    for number in (2, 20):
        store = HashStore()
        together(20, rounds(number), store)
        counts.append(store.num_keys())
    assert counts[0] == counts[1] <= 3


def test_an_error_is_raised_on_all_with_its_first_rank() -> None:
    def act(ranks: Ranks) -> None:
        ranks.agree(f"no {ranks.rank // 10}" if ranks.rank in (17, 25, 26) else None)

    answers, _ = together(30, act)
    assert set(answers.values()) == {"rank 17: no 1"}
    answers, _ = together(30, lambda ranks: ranks.agree("nobody can"))
    assert set(answers.values()) == {"nobody can"}


def test_what_rank_0_cannot_do_is_raised_on_all() -> None:
    def act(ranks: Ranks) -> object:
        assert ranks.told(lambda: {"from": ranks.rank}) == {"from": 0}
        return ranks.told(lambda: [][1] if ranks.rank else int("x"))

    answers, _ = together(12, act)
    assert len(set(answers.values())) == 1
    assert str(answers[7]).startswith("rank 0: invalid literal for int()")


@pytest.mark.parametrize("absent", [(3,), (1, 100), (0,)])
def test_ranks_that_do_not_come_are_named(monkeypatch, absent) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "2")
    answers, _ = together(120, rounds(1), absent=absent)
    assert len(answers) == 120 - len(absent)
    # For (1, 100), rank 12 misses rank 100 and reports it to rank 1, which is missing, too.
    (text,) = set(answers.values())
    assert text == f"no word of rank {absent[0]} for 2 s (AXONN_TIMEOUT_SECONDS)"


@pytest.mark.parametrize("late", [0, 1, 11])
def test_a_rank_that_comes_late_is_in_step_at_the_next_save(monkeypatch, late) -> None:
    """Its messages for the save that the others gave up never mix with those for the next save."""
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "2")
    gave_up = threading.Semaphore(0)

    def act(ranks: Ranks) -> list[object]:
        found: list[object] = []
        for kind in ("one", "two"):
            ranks.begin()
            try:
                ranks.reduced([kind], lambda a, b: a + b)
                if ranks.rank == late and kind == "one":
                    for _ in range(11):
                        assert gave_up.acquire(timeout=HANG_SECONDS)
                found.append(ranks.reduced([kind], lambda a, b: a + b))
                found.append(ranks.reduced({kind: 1}, lambda a, b: a | b))
            except RanksMissing as error:
                found.append(str(error))
                gave_up.release()
        return found

    answers, _ = together(12, act)
    text = f"no word of rank {late} for 2 s (AXONN_TIMEOUT_SECONDS)"
    assert len(answers) == 12
    for answer in answers.values():
        assert answer == [text, ["two"] * 12, {"two": 1}]


def test_a_tensor_that_stages_hold_in_other_ways_is_refused() -> None:
    grid = grid_of(GridShape(x=2, pipe=2))
    whole = Layout(grid, (4, 6), ((), ()), where={"pipe": (0, 1)})
    split = replace(whole, dims=(("x",), ()))

    def act(ranks: Ranks, layouts: tuple[Layout, Layout]) -> list[str]:
        stage = coords(grid, ranks.rank)["pipe"]
        tensors = {"table": StoredTensor("float32", layouts[stage])}
        return [*agreed_tables(tensors, Layout(grid, (), (), where={"pipe": (stage,)}), ranks)]

    answers, _ = together(4, lambda ranks: act(ranks, (whole, whole)))
    assert answers == {0: ["table"], 1: [], 2: [], 3: []}
    for other in (split, replace(whole, turn=1)):
        answers, _ = together(4, lambda ranks, other=other: act(ranks, (whole, other)))
        assert set(answers.values()) == {
            "rank 0: table: expected it alike on all pipeline stages, got float32 [4, 6] and split "
            "differently"
        }


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path) -> None:
    """This happens if a checkpoint is replaced while it is read, or if hosts share no folder."""
    for name in ("0", "1"):
        checkpoint.save(tmp_path / name, model=nn.Linear(2, 2))

    def act(ranks: Ranks) -> object:
        folder, model = tmp_path / str(ranks.rank % 2), nn.Linear(2, 2)
        return _load(folder, ranks, model, None, options=True, random=False)

    answers, _ = together(12, act)
    (text,) = {str(answer).partition(": ")[2] for answer in answers.values()}
    assert text.startswith("expected all ranks to read the same checkpoint, got tokens ")


def test_a_rank_that_is_at_work_is_waited_for(monkeypatch) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "4")

    def act(ranks: Ranks) -> object:
        end = time.monotonic() + (10 if ranks.rank == 15 else 0)
        while time.monotonic() < end:
            time.sleep(0.01)
            ranks.beat()
        return ranks.reduced(1, lambda a, b: a + b)

    answers, _ = together(20, act)
    assert set(answers.values()) == {20}


def test_a_load_does_not_look_for_another_checkpoint_where_ranks_are_missing(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "2")
    text = "no word of rank 2 for 2 s (AXONN_TIMEOUT_SECONDS)"
    store = HashStore()

    def act(ranks: Ranks) -> None:
        with _offering(tmp_path / "step-00000001", ranks):
            ranks.agree(None)

    answers, _ = together(12, act, store, absent=(2,))
    assert len(answers) == 11 and set(answers.values()) == {text}
    assert not store.check(["0/1/3"]), "what rank 3 says in a second round"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_has_ended_is_an_error_of_the_checkpoint(rank) -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(rank, 2, TCPStore("localhost", server.port, is_master=False))
    del server
    ranks.beat()
    with pytest.raises(CheckpointError, match="the store of the ranks does not answer"):
        ranks.agree(None)


def test_a_message_that_the_store_cannot_take_is_an_error() -> None:
    def act(ranks: Ranks) -> object:
        value = [hash((ranks.rank, n)) for n in range(1_000_000)] if ranks.rank == 2 else []
        return ranks.reduced(value, lambda a, b: a + b)

    answers, _ = together(3, act)
    (text,) = set(answers.values())
    assert "bytes, more than c10d's store takes" in str(text)
