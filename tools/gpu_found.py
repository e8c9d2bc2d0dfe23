"""Summarizes a stage of gpu_check.py in one line, from the files that it wrote."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_lines import read_lines

MOST_NAMES = 4
MAX_LINE = 300
WRONG = {"failed", "problem"}  # the status of a group, of a finding

Json = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A stage's summary line, whether anything in it is wrong, and whether anything ran."""

    line: str
    wrong: bool = False
    ran: bool = True


@dataclass(frozen=True)
class Tests:
    """The results of tests; `not_reached` is None before they have been collected."""

    passed: int
    failed: list[str]
    skipped: int
    not_reached: int | None

    def sentence(self) -> str:
        names = f" ({some(name.rpartition('/')[2] for name in self.failed)})" if self.failed else ""
        left = "no test was" if self.not_reached is None else f"{self.not_reached} not"
        return (
            f"{self.passed} passed, {len(self.failed)} failed{names}, {self.skipped} skipped, "
            f"{left} reached"
        )


def some(of: Iterable[str]) -> str:
    """The first few names, and the number of the others."""
    names = list(of)
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def count_tests(path: Path, began_at: int = 0) -> Tests:
    """Counts the tests with a line after byte `began_at`; `not_reached` is for the whole file."""
    rows = read_lines(path)
    collected = next((row["collected"] for row in rows if "collected" in row), None)
    reached = {row["test"] for row in rows if "test" in row}
    new = [row for row in read_lines(path, began_at) if "outcome" in row]
    counts = Counter(row["outcome"] for row in new)
    failed = [row.get("test") or row["outside"] for row in new if row["outcome"] == "failed"]
    left = None if collected is None else max(collected - len(reached), 0)
    return Tests(counts["passed"], failed, counts["skipped"], left)


def of_tests(path: Path, began_at: int) -> Found:
    """Summarizes tests; skipped tests do not count as run."""
    tests = count_tests(path, began_at)
    return Found(tests.sentence(), bool(tests.failed), ran=bool(tests.passed or tests.failed))


def of_training(metrics: Path, log: Path) -> Found:
    """The loss, which must fall, and the median speed over the second half of the steps."""
    steps = [row for row in read_lines(metrics) if "loss" in row]
    if not steps:
        return Found(f"no step has ended: {last_line(log)}", ran=False)
    half = steps[len(steps) // 2 :]
    speed = statistics.median(row["tokens_per_s"] for row in half)
    tflops = statistics.median(row["tflops"] for row in half)
    first, last = steps[0]["loss"], steps[-1]["loss"]
    line = (
        f"loss {first:.3f} -> {last:.3f} in {len(steps)} steps, {speed:,.0f} tokens/s, "
        f"{tflops:.1f} Tflop/s, {steps[-1]['memory_bytes'] / 2**30:.1f} GiB"
    )
    return Found(line, wrong=len(steps) > 1 and not last < first)


def of_rows(path: Path, log: Path) -> Found:
    """The number of rows that the command wrote, and the last line that it printed."""
    rows = read_rows(path)
    last = last_line(log)
    if rows and "status" in rows[0]:  # groups of `axonn-ext verify`, findings of doctor
        by_status: dict[str, list[str]] = {}
        for row in rows:
            by_status.setdefault(row["status"], []).append(name_of(row))
        wrong = sorted(WRONG.intersection(by_status))
        words = [f"{len(names)} {status}" for status, names in by_status.items()]
        words += [f"{status}: {some(by_status[status])}" for status in wrong]
        return Found(", ".join(words), bool(wrong), ran=set(by_status) != {"not run"})
    incorrect = [row for row in rows if row.get("correct") is False or row.get("problem")]
    line = f"{len(rows)} rows: " if rows else ""
    line += f"{len(incorrect)} WRONG: " if incorrect else ""
    return Found(line + last, bool(incorrect))


def name_of(row: Json) -> str:
    group = row.get("group", row)
    return str(group["name"] if isinstance(group, dict) else group)


def read_rows(path: Path) -> list[Json]:
    """The rows, groups or findings in a command's JSON; empty without a complete file."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    if isinstance(content, dict):
        lists = (content.get(name) for name in ("rows", "groups", "findings"))
        content = next((found for found in lists if found), [])
    return [row for row in content if isinstance(row, dict)]


def last_line(log: Path) -> str:
    """The last line of a log, except its first line, the command, and names of written files."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    said = (line.strip() for line in reversed(lines) if not line.startswith("written: "))
    return next((line[:MAX_LINE] for line in said if line), "")
