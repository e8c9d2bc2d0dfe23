"""A rank's use of the store does not depend on the number of ranks."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store

from axonn_ext.ranks.launch import bell, preemption
from axonn_ext.ranks.launch.attempt import name_of_start
from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.preemption import Preemption
from axonn_ext.ranks.launch.process import once_per_host
from axonn_ext.ranks.meeting import meet, said_by_all
from axonn_ext.ranks.stores import BATCH
from axonn_ext.train.watchdog import watchdog
from axonn_ext.train.watchdog.summary import SIGNAL, SUMMARY_FILE
from axonn_ext.train.watchdog.watchdog import Times, Watchdog
from commands import wait_until
from counting_store import CountingStore
from limits import HANG_SECONDS
from threads import many_threads, together

SIZES = (16, 128, 512)
PATIENCE = timedelta(seconds=HANG_SECONDS)
# The first, the last and the initiating rank do a little more than a typical rank.
MOST_MORE = 8


def meets(stores: list[CountingStore], folder: Path) -> None:
    size = len(stores)
    together([
        lambda r=r, s=s: meet(s, r, range(size), {"lr": "1"}, patience=PATIENCE)
        for r, s in enumerate(stores)
    ])  # fmt: skip


def all_say(stores: list[CountingStore], folder: Path) -> None:
    """Ranks say two different texts, and each rank reads both."""
    size = len(stores)
    together([
        lambda r=r, s=s: said_by_all(s, r, range(size), "ab"[r == 1], patience=PATIENCE)
        for r, s in enumerate(stores)
    ])  # fmt: skip


def get_a_name(stores: list[CountingStore], folder: Path) -> None:
    size = len(stores)
    together([
        lambda r=r, s=s: name_of_start(s, Process(r, size, size), HANG_SECONDS)
        for r, s in enumerate(stores)
    ])  # fmt: skip


def work_on_each_host(stores: list[CountingStore], folder: Path) -> None:
    size = len(stores)
    worked: list[int] = []

    def work(alive: Callable[[], None], rank: int) -> None:
        alive()
        worked.append(rank)

    together([
        lambda r=r, s=s: once_per_host(
            s, Process(r, size, 4), lambda alive: work(alive, r), topic="work"
        )
        for r, s in enumerate(stores)
    ])  # fmt: skip
    assert sorted(worked) == [*range(0, size, 4)]


def idle(stores: list[CountingStore], folder: Path) -> None:
    """Ranks take steps without any ring."""
    with jobs(stores, folder) as (stops, _):
        assert not any(stop.due(step) for step in range(5) for stop in stops)


def preempt(stores: list[CountingStore], folder: Path) -> None:
    with jobs(stores, folder) as (stops, _):
        stops[0].hear(signal.SIGTERM)
        wait_until(lambda: all(stop._ready.is_set() for stop in stops), "agreement")
        assert not stops[0].due(3) and all(stop.due(4) for stop in stops)


def report(stores: list[CountingStore], folder: Path) -> None:
    with jobs(stores, folder) as (_, dogs):
        dogs[0].hear(SIGNAL)
        wait_until(lambda: bool([*folder.glob(f"hangs/*/{SUMMARY_FILE}")]), "a report")


class jobs(ExitStack):
    """The bells, preemptions and watchdogs of all ranks, which leave together."""

    def __init__(self, stores: list[CountingStore], folder: Path) -> None:
        super().__init__()
        self.places = [Process(rank, len(stores), len(stores)) for rank in range(len(stores))]
        self.bells = [Bell(s, place) for s, place in zip(stores, self.places, strict=True)]
        pairs = [*zip(stores, self.places, self.bells, strict=True)]
        self.stops = [Preemption(s, place, bell=bell) for s, place, bell in pairs]
        times = Times(HANG_SECONDS, HANG_SECONDS)
        self.dogs = [
            Watchdog(bell, place, folder, times=times, say=str) for _, place, bell in pairs
        ]

    def __enter__(self):
        for each in (*self.bells, *self.dogs, *self.stops):
            each.__enter__()
        return self.stops, self.dogs

    def __exit__(self, *raised) -> None:
        for group in (self.stops, self.dogs, self.bells):
            together([lambda each=each: each.__exit__(None, None, None) for each in group])


ACTS = [meets, all_say, get_a_name, work_on_each_host, idle, preempt, report]


@pytest.mark.parametrize("act", ACTS)
def test_a_rank_costs_the_store_as_much_whatever_their_number(
    act: Callable[[list[CountingStore], Path], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(preemption, "AGREE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(preemption, "SAVE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(bell, "LEAVE_SECONDS", HANG_SECONDS)  # then a rank rings, and leaves
    # Here ranks are threads, so each rank's report would contain the stacks of all ranks.
    monkeypatch.setattr(watchdog, "stacks", str)
    typical = set()
    for size in SIZES:
        shared, events = HashStore(), {}
        stores = [CountingStore(shared, events) for _ in range(size)]
        with many_threads():
            act(stores, tmp_path / str(size))
        counts = [store.count for store in stores]
        typical.add((statistics.median_low(counts), statistics.median_low(bytes_of(stores))))
        if act in (all_say, report):  # one rank reads all texts, in batches
            counts = sorted(counts)[:-1]
            assert sum(s.operations.get("multi_get", 0) for s in stores) <= 2 * size
        assert max(counts) <= min(counts) + MOST_MORE, size
    assert len({count for count, _ in typical}) == 1, typical
    assert max(b for _, b in typical) <= 1.1 * min(b for _, b in typical), typical


def bytes_of(stores: list[CountingStore]) -> list[int]:
    return [store.num_bytes for store in stores]


def test_all_of_48_watchdogs_are_heard_before_anything_is_said(tmp_path: Path) -> None:
    size, real, shared = 32_768, 48, HashStore()
    counting, lines = CountingStore(shared), []
    places = [Process(rank, size, size) for rank in range(real)]
    bells = [Bell(counting if p.rank == 0 else shared, p) for p in places]
    times = Times(HANG_SECONDS, HANG_SECONDS)
    dogs = [
        Watchdog(bell, p, tmp_path, times=times, say=lines.append)
        for bell, p in zip(bells, places, strict=True)
    ]
    for each in (*bells, *dogs):
        each.__enter__()
    dogs[0].hear(SIGNAL)
    wait_until(lambda: shared.add("watchdog/changes", 0) == real, "48 reports")
    assert not lines, "32,720 ranks have not been heard"
    others = range(real, size - 1)
    shared.multi_set([f"watchdog/left/{rank}" for rank in others], ["its end"] * len(others))
    shared.add("watchdog/changes", len(others))
    wait_until(lambda: counting.operations.get("multi_get", 0) >= real // BATCH + 1, "a look")
    assert not lines, "one rank has not been heard"
    last = {**json.loads(shared.get("watchdog/0/report/1")), "rank": size - 1}
    shared.set(f"watchdog/0/report/{size - 1}", json.dumps(last))
    shared.add("watchdog/changes", 1)
    wait_until(lambda: bool(lines), "the line")
    assert lines[0].startswith("no rank has waited for another for 1 s (reports:"), lines
    together([lambda d=d: d.__exit__(None, None, None) for d in dogs])
    shared.add("bell/left", size - real)  # the simulated ranks leave, too
    together([lambda b=b: b.__exit__(None, None, None) for b in bells])


def test_a_silent_rank_is_named_once_its_time_is_up(tmp_path: Path) -> None:
    lines: list[str] = []
    shared: Store = HashStore()
    place = Process(0, 2, 2)
    bell = Bell(shared, place)
    with bell, Watchdog(bell, place, tmp_path, times=Times(60.0, 0.2), say=lines.append) as dog:
        dog.hear(SIGNAL)
        wait_until(lambda: bool(lines), "the line")
        shared.add("bell/left", 1)
    assert lines[0].startswith("rank 1 gave no report; no rank has waited for another"), lines
