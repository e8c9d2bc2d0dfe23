"""Jobs that are killed while they train and save, and then resume."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.folder import CheckpointFolder
from axonn_ext.checkpoint.reading import read_manifest
from kills import command, losses, run_until_killed
from limits import HANG_SECONDS

INTERVAL = 3


def options(steps: int, *more: str) -> tuple[str, ...]:
    return (
        *("--train.steps", str(steps), "--checkpoint.interval", str(INTERVAL)),
        *("--resume", "auto", "--grid", "2x1x1", *more),
    )


def uninterrupted(folder: Path, steps: int) -> dict[int, float]:
    subprocess.run(
        command(folder, *options(steps)), check=True, capture_output=True, timeout=HANG_SECONDS
    )
    return losses(folder)


def check_kills(tmp_path: Path, *, kills: int, full: set[int]) -> None:
    folder, draw = tmp_path / "killed", random.Random(1)
    failed_saves = set()
    checkpoints = CheckpointFolder(folder / "checkpoints")
    for attempt in range(kills):
        before = losses(folder)
        saved = checkpoints.latest()
        # With a full disk, the job runs long enough to try a save, and to report the error.
        done, output = run_until_killed(
            folder, options(1_000_000), draw, disk_full=attempt in full,
            steps=2 * INTERVAL + 1 if attempt in full else 1,
        )  # fmt: skip
        assert not done, output
        if "no checkpoint was written" in output:
            failed_saves.add(attempt)
        resumed = re.search(r"resumed  step ([\d,]+)", output)
        if saved is not None:
            assert resumed, output
            first = int(resumed[1].replace(",", ""))
            assert saved.name == f"step-{first:08d}"
            # At most the steps of one interval and those during an unfinished save are lost.
            assert attempt - 1 in full or max(before) - first < 2 * INTERVAL
        for step in checkpoints.steps():
            path = checkpoints.path(step)
            assert not list(find_problems(path, read_manifest(path)))
    assert failed_saves == full
    steps = max(losses(folder)) + 10
    assert uninterrupted(folder, steps) == uninterrupted(tmp_path / "whole", steps)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_kills_and_five_full_disks(tmp_path) -> None:
    check_kills(tmp_path, kills=50, full={7, 16, 25, 34, 43})
