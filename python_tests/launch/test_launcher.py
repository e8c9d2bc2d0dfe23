"""Ranks that are forks of their launcher, and its reports of ranks that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from axonn_ext.ranks.launch import launcher
from axonn_ext.terminal.errors import OutputClosed, TrainingError, WorkerUserError
from commands import environment
from limits import HANG_SECONDS

# A forked rank has the variables that the launcher has set; a newly started process has not.
SCRIPT = """
import sys, threading, time
import torch
import axonn_ext.cli.main
from axonn_ext.ranks.launch.launcher import launch
sys.modules["axonn_ext.cli.main"].__version__ = "of the launcher"
if sys.argv[1] == "python":
    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
if sys.argv[1] == "torch":
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()
launch(2, ["--version"])
"""


@pytest.mark.parametrize(("threads", "forked"), [("no", True), ("python", True), ("torch", False)])
def test_ranks_are_forks_where_they_can_do_all(threads: str, forked: bool) -> None:
    """If a process with OpenMP's thread pool forks, OpenMP in the child waits for its threads."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, threads], env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("axonn-ext ") for line in lines)
    assert [line == "axonn-ext of the launcher" for line in lines] == [forked, forked]


# Rank 0 requests the end of the job; otherwise rank 1 would report that rank 0 has ended.
TOLD_TO_END = """
import os, signal, socket, sys, time
import axonn_ext.cli.main
from axonn_ext.ranks.launch import launcher
first, second = socket.socketpair()
send = launcher._send

def send_slowly(*arguments):
    time.sleep(0.3)
    return send(*arguments)

def main():
    if os.environ["RANK"] == "0":
        second.close()
        first.send(b"0")
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(60)
    first.close()
    while second.recv(1):
        pass
    print("rank 0 has ended", flush=True)

def start(*arguments):
    start_ranks(*arguments)
    first.close(), second.close()

sys.modules["axonn_ext.cli.main"].main = main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # behind nohup it would be ignored
start_ranks, launcher._start, launcher._send = launcher._start, start, send_slowly
launcher.launch(2, [])
"""


def test_no_rank_sees_another_end_before_its_own_signal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END], env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1 and "OutputClosed" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_that_is_ignored_ends_no_job(ignored: bool) -> None:
    """nohup, for example, ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    heard: list[int] = []
    try:
        with launcher._hearing(heard, ()):
            os.kill(os.getpid(), signal.SIGHUP)
        assert heard == ([] if ignored else [signal.SIGHUP])
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ignored", [False, True])
def test_an_ignored_sigint_is_not_forwarded(ignored: bool) -> None:
    """A script's background ignores it, since the terminal sends it there, too."""
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)
    heard: list[int] = []
    try:
        with launcher._hearing(heard, (signal.SIGINT,)):
            os.kill(os.getpid(), signal.SIGINT)
        assert heard == ([] if ignored else [signal.SIGINT])
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_the_first_sigint_is_forwarded() -> None:
    forwarded = [signal.SIGINT]
    assert launcher._first_failures([], [signal.SIGINT], forwarded) == {}
    assert forwarded == []
    with pytest.raises(launcher._Ended) as ended:
        launcher._first_failures([], [signal.SIGINT, signal.SIGINT], [signal.SIGINT])
    assert ended.value.signal == signal.SIGINT


def test_signals_that_come_before_the_ranks_are_there_are_heard() -> None:
    heard: list[int] = [signal.SIGUSR2, signal.SIGTERM]
    with pytest.raises(launcher._Ended) as ended:
        launcher._first_failures([], heard, (signal.SIGUSR2,))
    assert ended.value.signal == signal.SIGTERM


def test_ends_are_noticed_where_they_are_ignored() -> None:
    """Some supervisors ignore SIGCHLD; then a process that ends has no status."""
    script = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)" + SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", script, "no"], env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout.count("axonn-ext")) == (0, "", 2)


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({3: 1}, r"rank 3 \(pid 103\) failed with exit status 1; the other 3 ended, too; its"),
        ({1: 1, 2: -signal.SIGKILL}, r"rank 2 .* was killed by SIGKILL; .*memory ran out"),
        ({1: -signal.SIGABRT, 2: -signal.SIGSEGV}, "rank 2 .* SIGSEGV; .*please report"),
        ({1: -signal.SIGABRT, 2: 1}, "rank 1 .* was killed by SIGABRT"),
        ({0: -signal.SIGTERM, 2: -signal.SIGABRT}, "rank 2 .* was killed by SIGABRT"),
        ({2: 7, 3: 1}, "rank 2 .* failed with exit status 7"),
        ({1: -35}, "rank 1 .* was killed by signal 35"),
    ],
)
def test_the_failure_that_came_first_is_told(statuses: dict[int, int], said: str) -> None:
    """The peers of a killed rank also fail, and C++ aborts on errors; neither is the cause."""
    failed = {
        rank: SimpleNamespace(exitcode=status, pid=100 + rank) for rank, status in statuses.items()
    }
    with pytest.raises(TrainingError, match=said):
        raise launcher._failure(failed, 4)


def test_a_rank_that_nobody_reads_ends_the_job_quietly() -> None:
    failed = {1: SimpleNamespace(exitcode=141, pid=1), 2: SimpleNamespace(exitcode=1, pid=2)}
    assert isinstance(launcher._failure(failed, 3), OutputClosed)


def test_a_user_error_was_printed_by_its_rank() -> None:
    failed = {0: SimpleNamespace(exitcode=1, pid=1), 1: SimpleNamespace(exitcode=2, pid=2)}
    assert isinstance(launcher._failure(failed, 2), WorkerUserError)
