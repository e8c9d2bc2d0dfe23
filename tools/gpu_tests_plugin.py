"""A pytest plugin that selects the tests of a lane, and writes a line of JSON as each test ends.

Lanes follow from markers and fixtures, so every new test is in one of them:

    one     tests in one process
    ranks   tests with ranks on GPUs (the fixture gpu_pool); ranks that share a GPU take turns on
            it, so nothing else should use it
    jobs    tests marked long, which start commands with ranks
    timing  tests marked timing, which need the GPU to themselves

If the CUDA context is lost, every later test would fail, so the process ends. gpu_tests.py starts a
new one, which skips the tests that already have a line.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gpu_lines import LOST_STATUS, add_line, file_of_running, read_lines

LANES = ("one", "ranks", "jobs", "timing")
SAMPLE = 2  # cases of each test function that run before all others
MAX_REASON = 6000  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="where to add a line for a test")
    parser.addoption("--lane", choices=LANES, help="only its tests (default: all)")
    parser.addoption(
        "--part", default="1/1", help="I/N: only the I-th of N parts of the tests, from 1"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(config.option.results))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane, results = config.option.lane, config.option.results
    part, parts = map(int, config.option.part.split("/"))
    found = [item for item in items if lane in (None, lane_of(item))][part - 1 :: parts]
    # Jobs stay in file order, so that each module's fixture, a training, runs only once.
    chosen = found if lane == "jobs" else in_order(found)
    rows = read_lines(results)
    if not any("collected" in row for row in rows):
        add_line(results, collected=len(chosen))
    done = {row["test"] for row in rows if "test" in row}
    items[:] = [item for item in chosen if item.nodeid not in done]


def lane_of(item: pytest.Item) -> str:
    """The lane of a test."""
    if item.get_closest_marker("timing"):
        return "timing"
    if item.get_closest_marker("long"):
        return "jobs"
    return "ranks" if "gpu_pool" in item.fixturenames else "one"  # type: ignore[attr-defined]


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Orders a few cases of every function first; within these and the rest, fewer ranks first.

    On one GPU, a pool's ranks end when a test asks for a different number, and starting ranks takes
    long.
    """
    seen: Counter[str] = Counter()
    keys = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        keys[item.nodeid] = (seen[function] >= SAMPLE, num_ranks(item))
        seen[function] += 1
    return sorted(items, key=lambda item: keys[item.nodeid])


def num_ranks(item: pytest.Item) -> int:
    """The number of ranks a test asks gpu_pool for, from its parameters; 2 if they do not say."""
    if "gpu_pool" not in item.fixturenames:  # type: ignore[attr-defined]
        return 1
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    shape = parameters.get("shape")
    return int(parameters.get("world_size") or getattr(shape, "size", 2))


class Results:
    """Writes the name of each test while it runs, and its result when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row: dict[str, Any] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records a file that cannot be imported, only once although every new process finds it."""
        known = {row.get("outside") for row in read_lines(self.path)} if report.failed else set()
        if report.failed and report.nodeid not in known:
            reason = shortened(report.longreprtext)
            add_line(self.path, outside=report.nodeid, outcome="failed", reason=reason)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file_of_running(self.path).write_text(nodeid, encoding="utf-8")
        self.row = {"test": nodeid, "outcome": "passed", "seconds": 0.0, "reason": ""}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.row["seconds"] = round(self.row["seconds"] + report.duration, 2)
        if report.failed:
            self.row |= {"outcome": "failed", "reason": self.row["reason"] + report.longreprtext}
        elif report.skipped and self.row["outcome"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "it may fail"
            self.row |= {"outcome": "skipped", "reason": reason.removeprefix("Skipped: ")}

    def pytest_runtest_logfinish(self) -> None:
        lost = why_lost()
        if lost:
            self.row |= {"outcome": "failed", "reason": f"{self.row['reason']}\n{lost}".strip()}
        add_line(self.path, **self.row | {"reason": shortened(self.row["reason"])})
        file_of_running(self.path).unlink()
        if lost:
            sys.stdout.flush()
            os._exit(LOST_STATUS)


def shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    half = MAX_REASON // 2
    return text if len(text) <= MAX_REASON else f"{text[:half]}\n[...]\n{text[-half:]}"


def why_lost() -> str:
    """Why CUDA no longer works in this process; empty if it does, or has not been used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"CUDA was lost: {error}"
    return ""
