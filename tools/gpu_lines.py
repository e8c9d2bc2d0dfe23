"""The results of tests marked gpu, a line of JSON each, as gpu_tests_plugin.py writes them.

A line has `test`, its `outcome` (passed, failed, skipped), its `seconds` and the `reason`. The
first line has the number of tests, as `collected`; a failure outside any test has `outside` instead
of `test`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOST_STATUS = 77  # of pytest, if its process must be replaced by another


def add_line(path: Path, **row: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path, began_at: int = 0) -> list[dict[str, Any]]:
    """The rows behind that byte; a line that is not whole is no row."""
    rows = []
    for line in path.read_bytes()[began_at:].splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def file_of_running(results: Path) -> Path:
    """The file with the name of the test that runs."""
    return results.with_suffix(".running")
