"""A killed launcher leaves no ranks behind at any moment; its last checkpoint is complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.folder import CheckpointFolder
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.spec.settings import launch_environment
from commands import AXONN, processes_with, start, torchrun, wait_until
from kills import COMMON, losses
from limits import HANG_SECONDS

ENDLESS = ("--grid", "x=2", "--train.steps", "1000000", "--checkpoint.interval", "2")
LAUNCHERS = {"axonn-ext": AXONN, "torchrun": torchrun(2)}


def in_a_save(folder: Path) -> bool:
    """Whether a checkpoint is being written after a complete one."""
    checkpoints = folder / "checkpoints"
    return any(checkpoints.glob(".step-*.partial")) and bool(CheckpointFolder(checkpoints).steps())


# Before its ranks have loaded torch, they cannot have met at the store.
MOMENTS = {
    "start": lambda folder: len(processes_with(str(folder))) == 2,
    "step": lambda folder: len(losses(folder)) >= 3,
    "save": in_a_save,
}


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_is_killed_leaves_nothing(
    tmp_path: Path, launcher: str, moment: str
) -> None:
    folder = tmp_path / "run"
    command = [*LAUNCHERS[launcher], "train", "--out", str(folder), *COMMON, *ENDLESS]
    job = start(command, output=tmp_path / "output.txt")
    try:
        wait_until(lambda: MOMENTS[moment](folder), f"the {moment} of a job")
        ranks = processes_with(str(folder))
        assert sorted(ranks.values()) == [0, 1]
        job.kill()
        job.wait(HANG_SECONDS)
        wait_until(lambda: not processes_with(str(folder)), "the end of the ranks")
    finally:
        job.kill()
        for pid in processes_with(str(folder)):
            os.kill(pid, signal.SIGKILL)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        assert not list(find_problems(path, read_manifest(path)))
    assert checkpoints.steps() or moment != "save"


CHILD = """
import os, sys
from axonn_ext.ranks.launch import parent
if sys.argv[2] == "thread":
    parent.PR_SET_PDEATHSIG = 0  # which does nothing
if sys.argv[2] == "signal":
    parent._look = lambda pid: None
if sys.argv[2] == "late":
    os.read(int(sys.argv[3]), 1)  # until the parent has ended
parent.end_with(int(sys.argv[1]))
print("here", flush=True)
os.read(int(sys.argv[4]), 1)  # for ever
"""
PARENT = """
import os, subprocess, sys
child = [sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
subprocess.Popen(child, pass_fds=[int(sys.argv[3]), int(sys.argv[4])], stdout=1)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["signal", "thread", "late"])
def test_a_process_ends_with_its_parent(how: str) -> None:
    """It ends by the signal, by its own check without a signal, and if its parent ended before."""
    ended, never = os.pipe(), os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, how, str(ended[0]), str(never[0])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[ended[0], never[0]],
    )  # fmt: skip
    os.close(never[0])
    assert parent.stdout is not None and parent.stdin is not None
    try:
        assert parent.stdout.readline() == b"started\n"
        if how != "late":
            assert parent.stdout.readline() == b"here\n"
        parent.kill()
        parent.wait(HANG_SECONDS)
        os.write(ended[1], b".")
        os.set_blocking(parent.stdout.fileno(), False)
        # The child holds the other end of the pipe until it ends.
        wait_until(lambda: parent.stdout.read() == b"", "the end of the child")
    finally:
        parent.kill()
        for end in (*ended, never[1]):
            os.close(end)


@pytest.mark.parametrize(
    ("variables", "by_agent", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "axonn-ext-17-abc"}, True, 17),
        ({"TORCHELASTIC_RUN_ID": "none"}, True, None),
        ({}, False, None),  # a user's own Python under srun
    ],
)
def test_who_has_started_a_rank(
    variables: dict[str, str], by_agent: bool, launcher: int | None
) -> None:
    here = launch_environment({"RANK": "0", "WORLD_SIZE": "2", **variables})
    assert here is not None
    assert (here.by_agent, here.launcher) == (by_agent, launcher)
