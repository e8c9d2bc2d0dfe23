"""A training job that is killed at random moments and started again."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from commands import workers_of
from limits import HANG_SECONDS

# A fixed algorithm: "auto" may choose another at each start, which may sum in another order.
COMMON = (
    *("--parallel.algorithm", "sequential", "--train.eval_interval", "0"),
    *("--optim.final_lr_fraction", "1"),  # so that the learning rate does not depend on train.steps
    *("--model.hidden_size", "128", "--model.num_layers", "2", "--model.num_heads", "4"),
    *("--model.sequence_length", "32", "--train.batch_size", "8"),
)


def command(folder: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "axonn_ext", "train", "--out", str(folder)), *COMMON, *options,
    ]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step; empty before the run has a folder."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    found = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the job was killed while writing this line
        if "loss" in values:
            found[values["step"]] = values["loss"]
    return found


def limit_files() -> None:
    """Limits files to less than a rank's part of a checkpoint, as if the disk were full.

    The metrics of a few thousand steps still fit.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))


def run_until_killed(
    folder: Path, options: tuple[str, ...], draw: random.Random, *, steps: int, disk_full: bool
) -> tuple[bool, str]:
    """Starts the job, and kills a rank a random time after `steps` steps; (done, output)."""
    job = subprocess.Popen(
        command(folder, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=limit_files if disk_full else None,
    )  # fmt: skip
    least, deadline = len(losses(folder)), time.monotonic() + HANG_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        now = len(losses(folder))
        least = min(least, now)  # a resumed job drops the steps after its checkpoint
        if now - least >= steps:
            break
        time.sleep(0.02)
    time.sleep(draw.expovariate(2.0))
    workers = workers_of(job.pid)
    if job.poll() is None and workers:
        os.kill(draw.choice(workers), signal.SIGKILL)
    output, _ = job.communicate(timeout=HANG_SECONDS)
    return job.returncode == 0, output
