"""The results of tests marked gpu, as gpu_tests_plugin.py writes them: one line of JSON per test.

A line has `test`, `outcome` (passed, failed, skipped), `seconds` and `reason`. The first line has
the number of tests, as `collected`. A failure outside any test has `outside` instead of `test`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOST_STATUS = 77  # pytest's exit status when a new process must replace this one


def add_line(path: Path, **row: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path, began_at: int = 0) -> list[dict[str, Any]]:
    """The rows after byte `began_at`, without incomplete lines."""
    rows = []
    for line in path.read_bytes()[began_at:].splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def file_of_running(results: Path) -> Path:
    """The file that holds the name of the running test."""
    return results.with_suffix(".running")
