"""SIGTERM, SIGUSR1 and Ctrl-C save a run, from the user's point of view."""

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
from commands import heed_signals, wait_until, workers_of
from kills import command, losses
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

ENDLESS = ("--train.steps", "1000000", "--checkpoint.interval", "500000", "--grid", "2x1x1")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts a run, and waits for its first steps."""
    job = subprocess.Popen(
        command(folder, *ENDLESS, "--resume", "auto", *options),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals,
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
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        job = start(folder)
        # First the launcher gets the signal, then a single rank.
        pid = workers_of(job.pid)[1] if number == signal.SIGUSR1 else job.pid
        output = end(job, pid, number)
        assert job.returncode == (130 if number == signal.SIGINT else 0), output
        assert output.endswith("\ninterrupted\n") == (number == signal.SIGINT), output
        saved = re.search(r"ended after step ([\d,]+), which is saved", output)
        assert saved, output
        step = int(saved[1].replace(",", ""))
        assert step > last
        assert CheckpointFolder(folder / "checkpoints").steps()[-1] == step
        assert max(losses(folder)) == step
        last = step


def test_one_process_saves_after_ctrl_c(tmp_path) -> None:
    job = start(tmp_path / "run", "--grid", "x=1")
    output = end(job, job.pid, signal.SIGINT)
    assert job.returncode == 130, output
    assert "To go on, run the same command with --resume auto --out" in output
    assert output.endswith("\ninterrupted\n")
    assert len(CheckpointFolder(tmp_path / "run" / "checkpoints").steps()) == 1


@pytest.mark.parametrize("grid", ["x=1", "x=2"])
def test_ctrl_c_without_checkpoints_says_so(tmp_path, grid: str) -> None:
    job = start(tmp_path / "run", "--checkpoint.interval", "0", "--grid", grid)
    output = end(job, job.pid, signal.SIGINT)
    assert job.returncode == 130, output
    assert "\ninterrupted; no weights were saved: checkpoint.interval is 0\n" in output
    assert "died" not in output and "Traceback" not in output


def test_a_second_ctrl_c_names_the_last_checkpoint(tmp_path) -> None:
    """The steps take seconds, so that the second comes before the end of one."""
    slow = ("--train.batch_size", "96", "--train.micro_batches", "96")
    job = start(tmp_path / "run", *slow, "--checkpoint.interval", "1")
    job.send_signal(signal.SIGINT)
    time.sleep(0.5)  # the launcher looks every 0.1 s
    output = end(job, job.pid, signal.SIGINT)
    assert job.returncode == 130, output
    assert "interrupted; the last checkpoint is" in output and "--resume auto --out" in output
    assert "died" not in output and "Traceback" not in output


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
