"""When a watchdog requests reports, how long it gathers them, and its keys in the store."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from torch.distributed import HashStore

from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.train.watchdog.watchdog import Times, Watchdog
from commands import wait_until
from threads import together


@pytest.mark.parametrize("timeout_s", [0.01, 1.0, 5.0, 60.0, 600.0, 1e6])
def test_reports_are_gathered_before_the_wait_fails(timeout_s: float) -> None:
    """Hearing the request may take as long as gathering the reports."""
    times = Times.before(timeout_s)
    assert times.gather > 0
    assert times.long + 2 * times.gather <= timeout_s
    assert times.long >= 0.75 * timeout_s


def test_who_has_left_is_not_silent_and_reports_do_not_add_up(tmp_path: Path) -> None:
    store, lines = HashStore(), list[str]()
    processes = [Process(rank, 2, 2) for rank in range(2)]
    bells = [Bell(store, process) for process in processes]
    dogs = [
        Watchdog(bell, process, tmp_path, times=Times(1e6, 0.5), say=lines.append)
        for bell, process in zip(bells, processes, strict=True)
    ]
    for bell in bells:
        bell.__enter__()
    with dogs[0]:
        with dogs[1]:
            pass
        dogs[0].hear(signal.SIGUSR2)
        wait_until(lambda: len(lines) > 0, "a line")
        assert lines[0].startswith("no rank has waited"), "nor given no report"
        assert store.check(["watchdog/0/report/0"])
        question = {"name": "again", "rank": 1, "why": "a test asks", "stuck": False}
        bells[1].ring("report", json.dumps(question), since=1)
        wait_until(lambda: store.check(["watchdog/1/report/0"]), "the second report")
        assert not store.check(["watchdog/0/report/0"])
    together([lambda bell=bell: bell.__exit__(None, None, None) for bell in bells])
