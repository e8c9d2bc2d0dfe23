"""A job that is told to end: all ranks end after the same step, or the process ends at once."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from axonn_ext.launch import preemption
from axonn_ext.launch.place import Process
from axonn_ext.launch.preemption import Preemption
from axonn_ext.launch.signals import SignalListener
from commands import wait_until
from limits import HANG_SECONDS


def listening(stop: Preemption) -> SignalListener:
    return SignalListener(dict.fromkeys(preemption.SIGNALS, stop.hear))


@pytest.mark.parametrize("number", preemption.SIGNALS, ids=lambda number: number.name)
def test_a_process_that_is_alone_ends_after_the_step(number: signal.Signals) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    stop = Preemption(HashStore(), Process(), say=lines.append)
    with stop, listening(stop):
        assert not stop.due(1)
        os.kill(os.getpid(), number)
        steps = itertools.count(1)
        wait_until(lambda: stop.due(next(steps)), "a step after which it ends")
    assert lines == [f"{number.name}: saving after the step that is under way"]
    assert signal.getsignal(number) == before


class Rank(threading.Thread):
    """A rank that takes steps, none of which begins before the one before has begun on all."""

    def __init__(self, stop: Preemption, begins: threading.Barrier, pause: float) -> None:
        super().__init__()
        self.stop, self.begins, self.pause, self.last = stop, begins, pause, 0

    def run(self) -> None:
        for step in range(1, 2000):
            self.begins.wait(HANG_SECONDS)
            time.sleep(self.pause)
            if self.stop.due(step):
                self.last = step
                return


def test_ranks_end_after_the_same_step_whoever_has_the_signal() -> None:
    for asked in range(3):
        store, begins = HashStore(), threading.Barrier(3)
        stops = [Preemption(store, Process(rank, 3, 3)) for rank in range(3)]
        ranks = [Rank(stop, begins, 0.002 * (2 - i)) for i, stop in enumerate(stops)]
        watchers = [
            threading.Thread(target=watch, args=(s, i == asked)) for i, s in enumerate(stops)
        ]
        for thread in (*ranks, *watchers):
            thread.start()
        for thread in (*ranks, *watchers):
            thread.join(HANG_SECONDS)
        assert len({rank.last for rank in ranks}) == 1 and ranks[0].last > 0


def watch(stop: Preemption, hears: bool) -> None:
    """Does what the thread of a rank does, of which one hears the signal."""
    time.sleep(0.2)
    if hears:
        stop._own_store.set(preemption._ASKED, "SIGTERM")
    while not stop._own_store.check([preemption._ASKED]):
        time.sleep(0.01)
    stop._left.wait(0.1)
    threading.Timer(1.0, stop._left.set).start()
    stop._end()


@pytest.mark.parametrize("why", ["a rank does not answer", "no step ends"])
def test_a_job_that_cannot_save_ends_at_once(monkeypatch, why) -> None:
    monkeypatch.setattr(preemption, "AGREE_SECONDS", 0.5)
    monkeypatch.setattr(preemption, "SAVE_SECONDS", 1.0)
    ended, lines = [], []
    size = 2 if why == "a rank does not answer" else 1
    stop = Preemption(
        HashStore(), Process(0, size, size), say=lines.append, end_process=ended.append
    )
    with stop, listening(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: bool(ended), "the end")
    assert ended == [1]
    expected = {
        "a rank does not answer": "SIGTERM: not all ranks answer; nothing is saved",
        "no step ends": "SIGTERM: no step ended and was saved within 1 s; the checkpoints before",
    }
    assert lines[-1].startswith(expected[why])
