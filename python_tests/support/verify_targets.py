"""Targets of groups in tests of `axonn-ext verify`, which pass, fail, die and hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

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
    """Rank 1 dies as by a trap; the others wait for it forever."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(600)
    return 1, []


def raises() -> tuple[int, list[str]]:
    raise RuntimeError("CUDA error: unspecified launch failure")


def runs_out_of_memory() -> tuple[int, list[str]]:
    """Rank 1 runs out of memory; the others wait for it forever."""
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    time.sleep(600)
    return 1, []


def is_wrong_beside_one_out_of_memory() -> tuple[int, list[str]]:
    if dist.get_rank() == 1:
        raise RuntimeError("CUDA error: out of memory")
    return 1, ["wrong"]


def finds_no_compiler() -> tuple[int, list[str]]:
    """Fails as triton does without a C compiler."""
    from triton.runtime import build

    os.environ.pop("CC", None)
    os.environ["PATH"] = "/nowhere"
    build.compile_module_from_src(src=f"// {time.time_ns()}, so that no cache has it", name="none")
    return 1, []


def lacks_python_h() -> tuple[int, list[str]]:
    subprocess.check_call(["false"])
    return 1, []


def hangs() -> tuple[int, list[str]]:
    """Writes its pid to a file, for which the test waits, and hangs."""
    if folder := os.environ.get("VERIFY_TARGETS_FOLDER"):
        (Path(folder) / "started").write_text(str(os.getpid()))
    time.sleep(600)
    return 1, []
