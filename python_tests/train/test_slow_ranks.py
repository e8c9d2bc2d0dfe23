"""A rank that is slow for long is named, but not one that is slow only for a while."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from axonn_ext import GridShape
from axonn_ext.train.slow_ranks import IN_A_ROW, WINDOW, SlowRanks
from commands import run, small, torchrun
from grids import grid_of

WORK, MORE = 0.1, 1.5  # seconds of each rank's work, and the factor for a slow rank
STEP = 4 * WORK  # seconds, the same on each rank


def said(
    shape: GridShape, factor: Callable[[int, int], float], windows: int, step_seconds: float = STEP
) -> list[str]:
    """The messages of rank 0. factor(rank, window): the factor for the rank's work."""
    lines: list[str] = []
    rank = dist.get_rank()
    noise = random.Random(rank)
    slow = SlowRanks(grid_of(shape), device="cpu", say=None if rank else lines.append)
    for window, step in itertools.product(range(windows), range(WINDOW)):
        own = WORK * factor(rank, window) * noise.uniform(0.97, 1.03)
        if step % 10 == 0:
            own += WORK * noise.uniform(0, 9)  # an occasional delay
        slow.step(step_seconds, step_seconds - own)
    return lines


def of_rank_3(rank: int, window: int) -> float:
    return MORE if rank == 3 else 1.0


def of_rank_3_in_a_stage(rank: int, window: int) -> float:
    return (MORE if rank == 3 else 1.0) * (1 + rank // 2)


def of_a_stage(rank: int, window: int) -> float:
    return 1.0 + rank // 2


def of_another_rank_each_time(rank: int, window: int) -> float:
    return MORE if rank == window % 4 else 1.0


def for_a_while(rank: int, window: int) -> float:
    return MORE if rank == 3 and window % IN_A_ROW else 1.0


def slightly(rank: int, window: int) -> float:
    return 1.1 if rank == 3 else 1.0


def test_a_rank_that_stays_slow_is_named_once(pool) -> None:
    for shape, factor in (
        (GridShape(x=2, data=2), of_rank_3),
        (GridShape(pipe=2, z=2), of_rank_3_in_a_stage),
    ):
        lines, *others = pool(4).run(said, shape, factor, 3 * IN_A_ROW)
        [line] = lines
        assert not any(others)
        begin = f"warning: rank 3 (host {socket.gethostname()}) slows down the job: a step without"
        assert line.startswith(begin)
        assert line.endswith(f"the slowest for {IN_A_ROW * WINDOW} steps")
        ratio = float(line.partition("takes ")[2].split()[0])
        assert abs(ratio - MORE) < 0.1, "noise is 3 % on each side"


def test_a_rank_that_is_slow_only_briefly_or_has_more_work_is_not_named(pool) -> None:
    flat = GridShape(x=2, data=2)
    for arguments in (
        (flat, of_rank_3, IN_A_ROW - 1),
        (flat, of_another_rank_each_time, 3 * IN_A_ROW),
        (flat, for_a_while, 3 * IN_A_ROW),
        (flat, slightly, 3 * IN_A_ROW),
        (flat, of_rank_3, 3 * IN_A_ROW, 20 * STEP),  # in long steps, where it hardly matters
        (GridShape(pipe=2, z=2), of_a_stage, 3 * IN_A_ROW),
    ):
        assert not any(pool(4).run(said, *arguments)), arguments


# `axonn-ext` with windows of two steps, and a rank 1 with slow updates.
PROGRAM = """
import os, sys, time
from axonn_ext.cli.main import main
from axonn_ext.optim import AdamW
from axonn_ext.train import slow_ranks
def slowly(self, *arguments, **options):
    time.sleep(0.2 * int(os.environ["RANK"]))
    return step(self, *arguments, **options)
slow_ranks.WINDOW, step, AdamW.step = 2, AdamW.step, slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_training_names_its_slow_rank(tmp_path: Path) -> None:
    """The other rank waits for it in each step, and in an evaluation after each step."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    *launcher, _, _ = torchrun(2)  # runs the program, not a module
    options = small(train__steps=2 * IN_A_ROW, train__eval_interval=1)
    done = run(
        [*launcher, str(program), "train", "--grid", "data=2", "--out", str(tmp_path / "run"),
         *options]
    )  # fmt: skip
    assert done.status == 0, done.output
    assert done.output.count("slows down the job") == 1, done.output
    assert f"warning: rank 1 (host {socket.gethostname()}) slows" in done.output
