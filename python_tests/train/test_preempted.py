"""SIGTERM and SIGUSR1 save a run, from the user's point of view."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.folder import CheckpointFolder
from axonn_ext.checkpoint.reading import read_manifest
from commands import wait_until, workers_of
from kills import command, losses
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

ENDLESS = ("--train.steps", "1000000", "--checkpoint.interval", "500000", "--grid", "2x1x1")


def start(folder: Path) -> subprocess.Popen[str]:
    """Starts a run, and waits for its first steps."""
    job = subprocess.Popen(
        command(folder, *ENDLESS, "--resume", "auto"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    before = len(losses(folder))
    wait_until(lambda: len(losses(folder)) >= before + 3 or job.poll() is not None, "three steps")
    return job


def end(job: subprocess.Popen[str], pid: int, number: signal.Signals) -> str:
    """Sends a signal that ends the job; returns the job's output."""
    os.kill(pid, number)
    output, _ = job.communicate(timeout=HANG_SECONDS)
    return output


def test_a_run_that_is_told_to_end_saves_and_goes_on(tmp_path) -> None:
    folder = tmp_path / "run"
    last = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        job = start(folder)
        # First the launcher gets the signal, then a single rank.
        pid = job.pid if number == signal.SIGTERM else workers_of(job.pid)[1]
        output = end(job, pid, number)
        assert job.returncode == 0, output
        saved = re.search(r"ended after step ([\d,]+), which is saved", output)
        assert saved, output
        step = int(saved[1].replace(",", ""))
        assert step > last
        assert CheckpointFolder(folder / "checkpoints").steps()[-1] == step
        assert max(losses(folder)) == step
        last = step


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_job_without_saving(tmp_path) -> None:
    folder = tmp_path / "run"
    job = start(folder)
    stopped = workers_of(job.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        time.sleep(0.5)  # rank 0 is waiting in a collective
        job.send_signal(signal.SIGTERM)
        wait_until(lambda: len(workers_of(job.pid)) < 2, "the end of the rank that answers")
    finally:
        if Path(f"/proc/{stopped}").exists():
            os.kill(stopped, signal.SIGKILL)
    output, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 1
    assert "SIGTERM: no answer from rank 1; nothing is saved" in output
    assert CheckpointFolder(folder / "checkpoints").steps() == []


@pytest.mark.slow
def test_ten_random_moments_leave_a_whole_checkpoint_each(tmp_path) -> None:
    folder, draw = tmp_path / "run", random.Random(2)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    steps: list[int] = []
    for _ in range(10):
        job = start(folder)
        time.sleep(draw.uniform(0, 2))
        output = end(job, job.pid, signal.SIGTERM)
        assert job.returncode == 0, output
        latest = checkpoints.latest()
        assert latest is not None
        assert not list(find_problems(latest, read_manifest(latest)))
        steps.append(checkpoints.steps()[-1])
        assert max(losses(folder)) == steps[-1], "nothing is lost"
    assert steps == sorted(set(steps))
