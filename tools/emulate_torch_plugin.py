"""A pytest plugin that skips the tests that the GPU in software does not run, with the reason.

These are the tests marked timing and those that left_out.toml lists. --slow-too runs the tests that
are left out only because they are slow. --counts FILE writes how many tests passed, which failed,
and how many were left out or skipped, and why.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LEFT_OUT = Path(__file__).parents[1] / "cpp_tests/gpu_machine/torch/left_out.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts", type=Path, help="where to write how many tests passed")
    parser.addoption("--slow-too", action="store_true", help="run slow tests, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.counts is not None:
        config.pluginmanager.register(Counts(config.option.counts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = tomllib.loads(LEFT_OUT.read_text())["left_out"]
    if config.option.slow_too:
        left_out = [entry for entry in left_out if not entry.get("slow")]
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.skip(reason="left out: it measures time"))
        for entry in left_out:
            # Escape the brackets of parameters, which fnmatch would read as a character set.
            if any(fnmatchcase(name, tests.replace("[", "[[]")) for tests in entry["tests"]):
                item.add_marker(pytest.mark.skip(reason=f"left out: {entry['because']}"))


class Counts:
    """The results of one session by outcome; skipped tests are counted by reason."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.passed and report.when == "call":
            self.passed += 1

    def pytest_sessionfinish(self) -> None:
        found = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        self.path.write_text(json.dumps(found))
