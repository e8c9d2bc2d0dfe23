"""What groups of cases run in tests of `axonn-ext verify`: they pass, fail, die and hang."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def passes() -> tuple[int, list[str]]:
    if dist.is_initialized():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    assert os.environ["AXONN_CACHE_DIR"] == "" and "RANK" not in os.environ
    return 3, []


def fails() -> tuple[int, list[str]]:
    return 2, ["one of two is wrong"]


def cannot_run() -> tuple[int, list[str]]:
    raise NotImplementedError("it is of sm_80\nand so on")


def rank_1_is_killed() -> tuple[int, list[str]]:
    """As by a trap: the others wait for it for ever."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)
    return 1, []


def raises() -> tuple[int, list[str]]:
    raise RuntimeError("CUDA error: unspecified launch failure")


def hangs() -> tuple[int, list[str]]:
    time.sleep(600)
    return 1, []
