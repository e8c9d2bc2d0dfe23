"""A job that a signal asks to end: all ranks stop after the same step, or the process at once."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed import HashStore, Store

from axonn_ext.ranks.launch import preemption
from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.preemption import Preemption
from axonn_ext.ranks.launch.signals import SignalListener
from commands import wait_until
from counting_store import CountingStore, SilentStore
from limits import HANG_SECONDS
from threads import many_threads, together


class Job:
    """The ranks of a job in one process, each with a bell and a preemption."""

    def __init__(self, store: Store, size: int, **of_rank_0: object) -> None:
        places = [Process(rank, size, size) for rank in range(size)]
        self.bells = [Bell(store, place) for place in places]
        self.stops = [
            Preemption(store, place, bell=bell, **(of_rank_0 if place.rank == 0 else {}))
            for place, bell in zip(places, self.bells, strict=True)
        ]

    @contextmanager
    def entered(self):
        for each in (*self.bells, *self.stops):
            each.__enter__()
        try:
            yield self
        finally:
            for stop in self.stops:
                stop.__exit__(None, None, None)
            together([lambda b=bell: b.__exit__(None, None, None) for bell in self.bells])


@pytest.mark.parametrize("number", preemption.SIGNALS, ids=lambda number: number.name)
def test_a_process_that_is_alone_ends_after_the_step(number: signal.Signals) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    job = Job(HashStore(), 1, say=lines.append)
    [stop] = job.stops
    with job.entered(), SignalListener(dict.fromkeys(preemption.SIGNALS, stop.hear)):
        assert not stop.due(1)
        os.kill(os.getpid(), number)
        steps = itertools.count(1)
        wait_until(lambda: stop.due(next(steps)), "a step after which it ends")
    again = "; Ctrl-C again ends the run" if number == signal.SIGINT else ""
    assert lines == [f"{number.name}: saving after the step that is under way{again}"]
    assert signal.getsignal(number) == before
    assert stop.is_interrupt == (number == signal.SIGINT)


def test_a_second_sigint_interrupts() -> None:
    job = Job(HashStore(), 1)
    [stop] = job.stops
    with job.entered(), SignalListener({signal.SIGINT: stop.hear}):
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: stop.due(1), "the end of the step")
        assert stop._timer is None, "the step has all the time that it needs"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(HANG_SECONDS)


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_after_sigint_ends_a_process_that_waits(
    again: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AGAIN_SECONDS", "SAVE_SECONDS"):
        monkeypatch.setattr(preemption, name, 0.1)
    ended: list[int] = []
    job = Job(HashStore(), 1, end_process=ended.append)
    [stop] = job.stops
    with job.entered():
        stop.hear(signal.SIGINT)
        assert stop._timer is None
        stop.hear(again)
        wait_until(lambda: ended == [130], "the end of the process")


@pytest.mark.parametrize("hear", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_ranks_end_after_the_same_step_whoever_has_the_signal(
    hear: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(preemption, "SAVE_SECONDS", HANG_SECONDS)
    begins, last = threading.Barrier(3), [0, 0, 0]

    def steps(rank: int, stop: Preemption) -> None:
        """Takes steps, each starting on all ranks at once, until all ranks are due to end."""
        for step in range(1, 20_000):
            begins.wait(HANG_SECONDS)
            if all(0 < end < step for end in last):
                return
            time.sleep(0.002 * (2 - rank))
            if step == 5 and rank in hear:
                stop.hear(signal.SIGTERM)
            if not last[rank] and stop.due(step):
                last[rank] = step

    job = Job(HashStore(), 3)
    with job.entered():
        together([lambda r=r, s=s: steps(r, s) for r, s in enumerate(job.stops)])
    assert len(set(last)) == 1 and last[0] >= 5


def test_nobody_asks_the_store_before_a_signal() -> None:
    store = CountingStore(HashStore())
    job = Job(store, 2)
    with job.entered():
        wait_until(lambda: store.count == 2, "the wait of each bell")
        assert not any(stop.due(step) for step in range(100) for stop in job.stops)
        assert store.count == 2


@pytest.mark.parametrize("why", ["a rank does not answer", "no step ends"])
def test_a_job_that_cannot_save_ends_at_once(monkeypatch, why) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", 0.5)
    monkeypatch.setattr(preemption, "SAVE_SECONDS", 1.0)
    ended: list[int] = []
    lines: list[str] = []
    size = 2 if why == "a rank does not answer" else 1
    job = Job(HashStore(), size, say=lines.append, end_process=ended.append)
    [bell, *_], [stop, *_] = job.bells, job.stops
    with bell, stop:  # rank 1 does not start its own
        stop.hear(signal.SIGTERM)
        wait_until(lambda: bool(ended), "the end")
    assert ended[0] == 1
    expected = {
        "a rank does not answer": "SIGTERM: no answer from rank 1; nothing is saved",
        "no step ends": "SIGTERM: no step ended and was saved within 1 s; earlier checkpoints",
    }
    assert any(line.startswith(expected[why]) for line in lines)


def test_the_more_ranks_the_longer_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", 0.01)
    monkeypatch.setattr(preemption, "AGREE_SECONDS_PER_RANK", HANG_SECONDS)
    ended: list[int] = []
    job = Job(HashStore(), 2, end_process=ended.append)
    job.stops[1]._end_process = ended.append
    with job.bells[0], job.stops[0]:
        job.stops[0].hear(signal.SIGTERM)
        time.sleep(0.3)
        with job.bells[1], job.stops[1]:
            ready = [stop._ready for stop in job.stops]
            wait_until(lambda: bool(ended) or all(each.is_set() for each in ready), "an agreement")
    assert ended == []


def test_if_one_rank_gives_up_none_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", 0.3)
    ended: list[int] = []
    job = Job(HashStore(), 3, end_process=ended.append)
    for stop in job.stops[1:]:
        stop._end_process = ended.append
    with ExitStack() as stack:
        for each in (*job.bells[:2], *job.stops[:2]):
            stack.enter_context(each)
        job.stops[1].hear(signal.SIGTERM)
        wait_until(lambda: ended == [1, 1], "the end of both")
        # The last rank comes too late; it learns the others' decision.
        with job.bells[2], job.stops[2]:
            wait_until(lambda: ended == [1, 1, 1], "the end of the third")
    assert not any(stop._ready.is_set() for stop in job.stops)


def test_a_silent_store_does_not_keep_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SAVE_SECONDS", 0.5)
    silence, ended = threading.Event(), []

    place = Process(0, 2, 2)
    stop = Preemption(
        store := SilentStore(HashStore(), silence),
        place,
        bell=Bell(store, place),
        end_process=ended.append,
    )
    hearing = threading.Thread(target=stop.hear, args=[signal.SIGTERM], daemon=True)
    hearing.start()
    wait_until(lambda: ended == [1], "the end")
    stop.__exit__(None, None, None)
    silence.set()
    hearing.join(HANG_SECONDS)


@pytest.mark.parametrize("size", [pytest.param(4096, marks=pytest.mark.slow), 256])
def test_thousands_of_ranks_agree(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(preemption, "SAVE_SECONDS", HANG_SECONDS)
    job = Job(CountingStore(HashStore(), {}), size)
    with many_threads(), job.entered():
        job.stops[size // 3].hear(signal.SIGTERM)
        wait_until(lambda: all(stop._ready.is_set() for stop in job.stops), "agreement")
        assert not job.stops[0].due(7)
        assert all(stop.due(8) for stop in job.stops)
        assert not any(stop.due(7) for stop in job.stops)
