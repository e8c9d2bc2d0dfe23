"""Runs one process of a group: `python -m axonn_ext.verify.worker TASK_AS_JSON`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_ext.ranks.launch.parent import end_with
from axonn_ext.spec import settings

NOT_RUN_STATUS = 3
# Errors with these texts are caused by the machine, or by another job on it, not by a kernel.
OF_THE_MACHINE = ("out of memory", "alloc_failed", "busy or unavailable", "find c compiler")


@dataclass(frozen=True)
class Task:
    """The work of a process, and where it writes the result."""

    target: str  # module:function
    rank: int
    num_ranks: int
    store: str  # the file in which the ranks meet
    device: str  # "cuda", or "cpu" for tests with targets that need no GPU
    result: str  # the file for the result
    parent: int  # the id of the parent process, with which this one ends


def run(task: Task) -> int:
    """Runs the target and writes {"cases", "failures"} or {"unsupported"}; returns the exit status.

    Before the target runs, the file has what the parent wrote; while it runs, there is no file.
    """
    torch.set_num_threads(1)
    try:
        _join(task)
    except Exception as error:
        return _unsupported(task, f"rank {task.rank} cannot start: {_first_line(error)}")
    Path(task.result).unlink()
    module, _, function = task.target.partition(":")
    try:
        cases, failures = getattr(importlib.import_module(module), function)()
        if task.device == "cuda":
            torch.cuda.synchronize()  # reports the errors of kernels that are still running
    except Exception as error:
        if _is_of_the_machine(error):
            return _unsupported(task, _first_line(error))
        raise
    _write(task, {"cases": cases, "failures": failures})
    return 0


def _join(task: Task) -> None:
    """Selects the GPU and connects the ranks by a first collective, in which NCCL connects."""
    if task.device == "cuda":
        num_gpus = torch.cuda.device_count()
        if task.num_ranks > num_gpus:
            settings.let_ranks_share_gpus(task.rank)
        torch.cuda.set_device(task.rank % num_gpus)
    if task.num_ranks > 1 or task.device == "cuda":
        settings.prepare_connections()
        seconds = timedelta(seconds=settings.load().timeout_seconds)
        store = dist.FileStore(task.store)
        store.set_timeout(seconds)
        dist.init_process_group(
            "nccl" if task.device == "cuda" else "gloo",
            store=store,
            rank=task.rank,
            world_size=task.num_ranks,
            timeout=seconds,
        )
    first = torch.ones(1, device=task.device)
    if task.num_ranks > 1:
        dist.all_reduce(first)
    first.item()  # waits for the GPU


def _is_of_the_machine(error: Exception) -> bool:
    """Whether the machine caused the error: it has no kernel, or lacks something."""
    if isinstance(error, NotImplementedError | torch.OutOfMemoryError):
        return True
    if isinstance(error, subprocess.CalledProcessError):  # triton's C compiler may lack Python.h
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in OF_THE_MACHINE)


def _unsupported(task: Task, reason: str) -> int:
    _write(task, {"unsupported": reason})
    return NOT_RUN_STATUS


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _write(task: Task, found: dict[str, object]) -> None:
    Path(task.result).write_text(json.dumps(found), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    task = Task(**json.loads(argv[0]))
    end_with(task.parent)
    status = run(task)
    if status:
        os._exit(status)  # leaving the group normally might wait for the peers
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
