"""Standard output and standard error that are closed, full, or unable to show a character."""

from __future__ import annotations

import importlib
import os
import resource
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from axonn_ext.cli import streams
from axonn_ext.spec.settings import LAUNCHED_BY_US
from commands import AXONN, ROOT, environment, processes_with, small, wait_until
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

PLAN = ("plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "8",
        "--global-batch", "64")  # fmt: skip
READER_GONE = 141


def shell(
    arguments: tuple[str, ...] | list[str], redirection: str, **variables: str
) -> tuple[int, str, str]:
    """Runs the command with its streams redirected by bash; returns status, output and errors.

    Descriptor 9 is a pipe whose reader is gone.
    """
    command = f"{shlex.join([*AXONN, *arguments])} {redirection}; exit ${{PIPESTATUS[0]}}"
    reader, gone = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["bash", "-c", f"exec 9>&{gone} {gone}>&-; {command}"], cwd=ROOT, pass_fds=(gone,),
        env=environment() | variables, capture_output=True, text=True, errors="surrogateescape",
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    os.close(gone)
    return done.returncode, done.stdout, done.stderr


def test_streams_of_one_process(tmp_path: Path) -> None:
    train = ["train", "--nproc", "1", "--out", str(tmp_path / "run"), *small(train__steps=5000)]
    full = "error: No space left on device (standard output)\n"
    cases: list[tuple[list[str], str, tuple[int, str, str]]] = [
        ([*PLAN], ">&9", (READER_GONE, "", "")),
        (["--help"], ">&9", (READER_GONE, "", "")),
        (train, "| head -1 >/dev/null", (READER_GONE, "", "")),
        ([*PLAN], ">&-", (0, "", "")),
        (["compare", "a"], "2>&-", (2, "", "")),
        (["compare", "a"], ">&- 2>&-", (2, "", "")),
        (["compare", "a"], "2>/dev/full", (2, "", "")),
        (["compare", "a"], "2>&9", (2, "", "")),
        ([*PLAN], ">/dev/full", (1, "", full)),
        (["--help"], ">/dev/full", (1, "", full)),
    ]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda case: shell(case[0], case[1]), cases))
    for (arguments, redirection, expected), got in zip(cases, found, strict=True):
        assert got == expected, (arguments, redirection)


@pytest.mark.parametrize(("now", "asked"), [(70, [(70, signal.SIGPIPE)]), (1, []), (71, [])])
def test_only_the_launcher_is_asked_to_end_the_job(
    now: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new parent of this process after the launcher is gone, init or a container's, is not."""
    parents, found = iter([70]), []

    def fail(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(os, "getppid", lambda: next(parents, now))
    monkeypatch.setattr(os, "kill", lambda *call: found.append(call))
    monkeypatch.setattr("axonn_ext.cli.compare.run", fail)
    monkeypatch.setattr(
        "axonn_ext.ranks.launch.parent.end_with", lambda *_, **__: None
    )  # would affect this process
    module = importlib.import_module("axonn_ext.cli.main")
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.0)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": f"{LAUNCHED_BY_US}1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(streams, "drop", lambda stream: None)
    assert module.main(["compare", "a", "b"]) == READER_GONE
    assert found == asked


def test_a_launched_job_whose_reader_goes_ends_quietly(tmp_path: Path) -> None:
    """No rank reports that another has died, and the launcher does not refer to a message above."""
    folder = tmp_path / "run"
    train = ["train", "--grid", "x=2", "--out", str(folder), *small(train__steps=100_000)]
    status, output, errors = shell(train, "| head -1")
    assert (status, errors) == (READER_GONE, "")
    assert output.startswith("  model  gpt2")
    wait_until(lambda: not processes_with(str(folder)), "the end of all processes")


def test_a_terminal_that_cannot_show_a_character(tmp_path: Path) -> None:
    """The character is shown escaped, as is a name whose bytes are not UTF-8."""
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for name, shown in (("f\u00fc", "f\\xfc"), ("f\udcff", "f\\udcff")):
        path = str(tmp_path / f"{name}.json")
        variables = ascii_only if name == "f\u00fc" else {}
        status, output, errors = shell([*PLAN, "--json", path], "", **variables)
        assert (status, errors) == (0, "")
        assert output.splitlines()[-1].endswith(f"{shown}.json")
        status, output, errors = shell(["compare", path, "b"], "", **variables)
        assert status == 2 and shown in errors and "Traceback" not in errors


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_few_open_files(num_ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "--grid", f"x={num_ranks}", "--out", str(folder), *small()]
    done = subprocess.run(
        [*AXONN, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: a job of {num_ranks} rank")
    assert "open files here, but this machine allows 24" in done.stderr
    assert not folder.exists() and len(done.stderr.splitlines()) == 1


def test_a_library_user_is_told_which_variable_is_wrong() -> None:
    """They get a ValueError when the settings are first needed, not on import."""
    program = """
import axonn_ext
from axonn_ext import planner
try:
    axonn_ext.ops
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        env=environment() | {"AXONN_TIMEOUT_SECONDS": "soon"}, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.stdout.startswith("AXONN_TIMEOUT_SECONDS must be a number of seconds")
