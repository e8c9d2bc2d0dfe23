"""Hundreds of command lines, files and variables, drawn at random: none ends in a traceback."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_ext.cli.main import COMMANDS, _parser
from command_fuzz import COMMANDS as STARTS
from command_fuzz import RIGHT
from commands import ROOT, environment, processes_with

COUNT = 400
LEAST = COUNT // 10  # minimum number of valid lines, and of invalid ones
MOST_LINES, MOST_CHARACTERS = 12, 4000  # maximum of an error; that of a model lists its rules


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser, which may have subcommands themselves."""
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_drawn(command: str) -> None:
    """Every command, including new ones, is drawn with mistakes and without."""
    parser = _below(_parser([command]))[command]
    for wanted in [(command, action) for action in _below(parser)] or [(command,)]:
        size = len(wanted)
        assert any(start[:size] == wanted for start in STARTS), f"COMMANDS has no {wanted}"
        assert any(tuple(line.split()[:size]) == wanted for line, _ in RIGHT), (
            f"RIGHT has no {wanted}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_any_command_line_ends_well(seed: int, tmp_path: Path) -> None:
    """Every line ends with status 0, 1 or 2, never with a traceback or a long message. With status
    2, no work has been done. Valid lines end with status 0.
    """
    folder = tmp_path / "here"
    folder.mkdir()
    temporary = tmp_path / "tmp"  # torch leaves an empty folder there
    temporary.mkdir()
    variables = environment() | {
        "AXONN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary),
    }  # fmt: skip
    program = Path(__file__).parents[1] / "support" / "command_fuzz.py"
    before = {path.name for path in ROOT.iterdir()}
    done = subprocess.run(
        [sys.executable, str(program), str(seed), str(COUNT)],
        cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == COUNT
    statuses = [case["status"] for case in cases]
    assert min(statuses.count(0), statuses.count(2)) > LEAST, "the draw is of one kind"
    for case in cases:
        errors, lines = case["errors"], case["errors"].splitlines()
        assert case["status"] in ((0,) if case["right"] else (0, 1, 2)), case
        assert not case["left"] and "Traceback" not in errors + case["output"], case
        if case["status"] == 2:
            assert case["output"] == "" and 1 <= len(lines) <= MOST_LINES, case
            assert re.match(r"(\[rank \d\] )?error: ", errors), case
            assert len(errors) < MOST_CHARACTERS, case
    assert not processes_with(str(tmp_path))
    assert {path.name for path in ROOT.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} <= {*("here", "cache", "tmp", "out", "err")}
    assert not list(temporary.glob("axonn*"))
