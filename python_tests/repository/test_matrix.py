"""tools/matrix.py: its summary of a run, and the place where it writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loading import load

ROOT = Path(__file__).resolve().parents[2]
matrix = load("tools/matrix.py")


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("...\n312 passed in 60.12s (0:01:00)\n", "312 passed"),
        ("FAILED x\n2 failed, 310 passed, 1 skipped in 70s\n", "2 failed, 310 passed, 1 skipped"),
        ("ERROR y\n1 error in 2s\n", "1 error"),
        ("no such file\n", "the tests did not run"),
    ],
)
def test_summary_is_what_pytest_counts(output: str, text: str) -> None:
    assert matrix.summary(output) == text


TEXT = """
words

| Python | torch | tests | day | processor |
| --- | --- | --- | --- | --- |
| 3.11.7 | 2.13.0+cpu | 9 passed | 2026-01-01 | P |
| 3.12 | 2.11 | not run: there is no python3.12 here | 2026-01-01 | P |

more words
"""


def test_rows_replace_those_of_their_combination() -> None:
    text = matrix.with_row(TEXT, "| 3.11.2 | 2.13.0 | 8 passed | 2026-01-02 | Q |")
    text = matrix.with_row(text, "| 3.12.1 | 2.11.0 | 7 passed | 2026-01-02 | Q |")
    text = matrix.with_row(text, "| 3.11.7 | 2.9.1 | 6 passed | 2026-01-02 | Q |")
    assert text == (
        TEXT.split("| 3.11.7")[0]
        + "| 3.11.7 | 2.9.1 | 6 passed | 2026-01-02 | Q |\n"
        + "| 3.11.2 | 2.13.0 | 8 passed | 2026-01-02 | Q |\n"
        + "| 3.12.1 | 2.11.0 | 7 passed | 2026-01-02 | Q |\n\nmore words\n"
    )
    with pytest.raises(ValueError, match="has no table that begins with"):
        matrix.with_row("words", "| 3.11.2 | 2.13.0 | 8 passed | 2026-01-02 | Q |")


def test_what_was_not_run_takes_no_other_row_s_place() -> None:
    why = "not run: there is no python3.11 here"
    there = f"| 3.11 | 2.13 | {why} | 2026-01-02 | Q |"
    assert matrix.with_row(TEXT, there, ran=False) == TEXT
    new = f"| 3.11 | 2.14 | {why} | 2026-01-02 | Q |"
    assert new in matrix.with_row(TEXT, new, ran=False).split("\n")


def test_contributing_has_the_table() -> None:
    line = "| 3.99.0 | 2.99.0 | 8 passed | 2026-01-02 | Q |"
    assert line in matrix.with_row(matrix.TABLE.read_text(), line).split("\n")


def test_an_interpreter_that_is_missing_is_a_row() -> None:
    row = matrix.run_combination("/nowhere/python3.12", "2.14")
    assert (row.python, row.torch) == ("3.12", "2.14")
    assert row.tests == "not run: there is no python3.12 here" and row.ok and not row.ran


@pytest.mark.parametrize("python", ["/nowhere/python", "/nowhere/pypy3"])
def test_a_missing_interpreter_of_no_version_is_an_error(python: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "matrix.py")],
        env=os.environ | {"PYTHONS": python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"there is no {python} here, and its name tells no version" in done.stderr
