"""The bell: every rank hears every ring once, from any rank, and can leave at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from axonn_ext.ranks.launch import bell as bell_module
from axonn_ext.ranks.launch.bell import Bell, Ring
from axonn_ext.ranks.launch.place import Process
from commands import wait_until
from counting_store import CountingStore, SilentStore
from threads import together

KINDS = ("hash", "tcp", "file")


def store_of(kind: str, folder: Path) -> Store:
    if kind == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return HashStore() if kind == "hash" else FileStore(str(folder / "store"))


def bells_of(store: Store, size: int) -> tuple[list[Bell], list[list[tuple[int, str]]]]:
    """A bell for each rank, and the rings that each hears for the topic "test"."""
    bells = [Bell(PrefixStore("job", store), Process(rank, size, size)) for rank in range(size)]
    heard: list[list[tuple[int, str]]] = [[] for _ in bells]
    for bell, own in zip(bells, heard, strict=True):
        bell.hears("test", lambda ring, own=own: own.append((ring.number, ring.text)))
    return bells, heard


def leave(bells: list[Bell]) -> None:
    together([lambda bell=bell: bell.__exit__(None, None, None) for bell in bells])
    assert not any(bell._thread.is_alive() for bell in bells)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_hears_every_ring_in_order(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    bells, heard = bells_of(store, 5)
    for bell in bells:
        bell.__enter__()
    for number, rank in enumerate((3, 0, 3)):
        bells[rank].ring("test", f"by {rank}", since=number)
        wait_until(lambda: all(len(own) > number for own in heard), "a ring")  # noqa: B023
    leave(bells)
    assert heard == [[(0, "by 3"), (1, "by 0"), (2, "by 3")]] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_who_rings_at_once_for_one_topic_is_one_ring(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    bells, heard = bells_of(store, 6)
    together([lambda bell=bell: bell.ring("test", "") for bell in bells])  # no rank listens yet
    bells[0].ring("other", "")
    for bell in bells:
        bell.__enter__()
    wait_until(lambda: all(heard) and all(bell._next == 2 for bell in bells), "both rings")
    leave(bells)
    assert heard == [[(0, "")]] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_is_heard_after_a_rank_has_left_alone(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    bells, heard = bells_of(store, 3)
    for bell in bells:
        bell.__enter__()
    bells[1].__exit__(RuntimeError, RuntimeError("a failure"), None)
    assert not bells[1]._thread.is_alive()
    bells[2].ring("test", "after")
    wait_until(lambda: bool(heard[0] and heard[2]), "a ring")
    leave([bells[0], bells[2]])
    assert [text for own in heard for _, text in own] == ["after"] * 2


def test_an_idle_rank_waits_once_and_asks_nothing() -> None:
    store = CountingStore(HashStore())
    with ExitStack() as stack:
        bells = [Bell(store, Process(rank, 2, 2)) for rank in range(2)]
        for bell in bells:
            bell.__enter__()
        wait_until(lambda: store.count == 2, "both waits")
        stack.callback(leave, bells)
        with pytest.raises(RuntimeError):
            HashStore().wait(["nothing"], timedelta(seconds=1))  # let some time pass
        assert store.operations.keys() - {"bytes"} == {"wait"} and store.count == 2


def test_a_rank_leaves_although_the_store_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell_module, "LEAVE_SECONDS", 0.2)
    silence = threading.Event()

    try:
        bell = Bell(SilentStore(HashStore(), silence), Process(0, 2, 2))
        bell.hears("test", lambda ring: None)
        bell.__enter__()
        together([lambda: bell.__exit__(RuntimeError, RuntimeError("a failure"), None)])
    finally:
        silence.set()


def test_a_ring_has_the_client_of_its_thread() -> None:
    store, rings = HashStore(), []
    bell = Bell(store, Process())
    bell.hears("test", rings.append)
    with bell:
        bell.ring("test", "text")
        wait_until(lambda: bool(rings), "the ring")
    assert rings == [Ring(0, "text", bell._ears)]
