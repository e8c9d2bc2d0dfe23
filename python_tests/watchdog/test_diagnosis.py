"""The rank that the reports of all ranks blame."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from axonn_ext.overlap.watch import GROUP_PREFIX
from axonn_ext.train.watchdog import report as report_module
from axonn_ext.train.watchdog.diagnosis import diagnose
from axonn_ext.train.watchdog.report import Progress, Report, Waiting

X = ("x", "axis x", (0, 1, 2, 3))


def waiting(*peers: int, number: int = 7, seconds: float = 9.0, group=X, call="op a=1") -> Waiting:
    name, label, ranks = group
    return Waiting(name, label, ranks, call, number, peers, "has not come", seconds)


def report(rank: int, *waits: Waiting, calls: int = 7, group: str = "x") -> Report:
    progress = (Progress(group, "axis x", (0, 1, 2, 3), calls, "op"),)
    return Report(rank, "host", 1, f"file.py:{rank} in f", waits, progress)


def test_a_wait_for_one_peer_is_followed_also_inside_of_one_call() -> None:
    """In an all-reduce, rank 0 waits for rank 1's sum, which waits for rank 3's addends."""
    waits = [report(0, waiting(1, seconds=9.5)), report(1, waiting(3)), report(2, waiting(3))]
    for third, how in ((None, "It has given no report"), (report(3), "It is at file.py:3 in f")):
        line = diagnose(dict(enumerate([*waits, third])))
        assert line.startswith("rank 3 holds the job up: rank 1 has waited for it for 9.0 s in op,")
        assert how in line


def test_of_many_peers_the_one_that_is_behind_is_blamed() -> None:
    everyone = [waiting(*(set(range(4)) - {rank})) for rank in range(4)]
    late = [report(rank, everyone[rank]) for rank in range(3)]
    assert diagnose(dict(enumerate([*late, report(3, calls=6)]))).startswith("rank 3 holds")
    assert diagnose(dict(enumerate([*late, None]))).startswith("rank 3 holds")
    working = [report(0, everyone[0]), report(1), report(2, calls=6), report(3, everyone[3])]
    assert diagnose(dict(enumerate(working))).startswith("rank 2 holds"), "it is further behind"
    all_in = dict(enumerate([*late, report(3, everyone[3])]))
    assert "have come to this call: is their network down?" in diagnose(all_in)


def test_calls_without_a_number_are_not_taken_for_the_same() -> None:
    waits = {0: report(0, waiting(1, 2, 3, number=0)), 1: report(1, waiting(2, number=0))}
    line = diagnose(waits | {2: report(2), 3: report(3)})
    assert line.startswith(("rank 2 holds", "rank 3 holds"))


def test_a_rank_in_an_earlier_call_has_not_come_to_this_one() -> None:
    everyone = [report(0, waiting(1, 2, seconds=9.5)), report(1, waiting(0, 2))]
    behind = [report(2, waiting(3, number=6)), report(3)]
    assert diagnose(dict(enumerate(everyone + behind))).startswith("rank 3 holds")


def test_of_the_waits_of_a_rank_the_longest_is_followed() -> None:
    several = report(1, waiting(3, seconds=2.0), waiting(2), waiting(0, seconds=1.5))
    waits = [report(0, waiting(1, seconds=9.5)), several, report(2), report(3)]
    assert diagnose(dict(enumerate(waits))).startswith("rank 2 holds")


def test_a_circle_names_all_its_ranks() -> None:
    y = ("y", "axis y", (0, 1))
    line = diagnose({0: report(0, waiting(1)), 1: report(1, waiting(0, group=y, number=3))})
    assert line.startswith("ranks wait for each other in a circle: ")
    assert "rank 0 in op, call 7 of axis x (ranks 0, 1, 2, 3)" in line
    assert "rank 1 in op, call 3 of axis y (ranks 0, 1)" in line


def test_a_rank_that_has_issued_a_collective_need_not_wait_for_it() -> None:
    lane = (f"{GROUP_PREFIX}x", "axis x", (0, 1, 2))
    wait = waiting(1, 2, group=lane, number=5)
    reports = {
        0: report(0, wait, group=lane[0], calls=5),
        1: report(1, group=lane[0], calls=6),
        2: report(2, group=lane[0], calls=4),
    }
    assert diagnose(reports).startswith("rank 2 holds")


def test_an_end_and_a_destroyed_group_are_said() -> None:
    ended = Report.of_ended(1, "its end: its work is done")
    line = diagnose({0: report(0, waiting(1)), 1: ended})
    assert line.endswith("It is at its end: its work is done")
    assert "a group that has been destroyed" in diagnose({0: report(0, waiting())})


@pytest.mark.parametrize("stuck", [True, False])
def test_without_waits_the_rank_with_the_fewest_calls_is_named_if_the_job_is_stuck(stuck) -> None:
    reports = {0: report(0, calls=9), 1: report(1, calls=4), 2: report(2, calls=9)}
    line = diagnose(reports, stuck=stuck)
    assert line.startswith("no rank has waited for another for 1 s")
    assert ("rank 1 has made 4 calls" in line) == stuck
    assert diagnose(reports | {2: None}).startswith("rank 2 gave no report; no rank has waited")


def test_many_ranks_are_not_all_listed() -> None:
    group = ("x", "axis x", tuple(range(500)))
    line = diagnose({0: report(0, waiting(1, group=group)), 1: report(1)})
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7 and 492 more)" in line


def test_the_place_is_in_the_program_not_in_a_library(monkeypatch) -> None:
    def frame(file: str, back: object) -> SimpleNamespace:
        code = SimpleNamespace(co_filename=file, co_qualname="f")
        return SimpleNamespace(f_code=code, f_lineno=3, f_back=back)

    paths = {"stdlib": "/py/lib", "purelib": "/py/lib/site-packages"}
    paths["platlib"] = paths["purelib"]
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    frozen = frame("<frozen runpy>", None)
    program = frame("/py/lib/site-packages/mine/train.py", frozen)
    library = frame("/py/lib/threading.py", program)
    assert report_module._place(library) == "mine/train.py:3 in f"
    assert report_module._place(frozen) == "<frozen runpy>:3 in f"
    assert report_module._place(None) == "an unknown place"
    here = sys._getframe()
    assert report_module._place(here).startswith(f"watchdog/{Path(__file__).name}:")
