"""One process of a group of cases: `python -m axonn_ext.verify.worker TASK`, a `Task` as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_ext import settings


@dataclass(frozen=True)
class Task:
    """What a process is to run, and where it writes what it found."""

    target: str  # module:function
    rank: int
    num_ranks: int
    port: int  # of the store on this host
    device: str  # cuda, or cpu, where targets that need no GPU are tried
    result: str  # the file


def run(task: Task) -> None:
    """Runs the target and writes {"cases", "failures"} or {"unsupported"}."""
    torch.set_num_threads(1)
    if task.device == "cuda":
        num_gpus = torch.cuda.device_count()
        if task.num_ranks > num_gpus:
            settings.let_ranks_share_gpus(task.rank)
        torch.cuda.set_device(task.rank % num_gpus)
    if task.num_ranks > 1 or task.device == "cuda":
        seconds = timedelta(seconds=settings.load().timeout_seconds)
        dist.init_process_group(
            "nccl" if task.device == "cuda" else "gloo",
            store=dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=seconds),
            rank=task.rank,
            world_size=task.num_ranks,
            timeout=seconds,
        )
    module, _, function = task.target.partition(":")
    found: dict[str, object]
    try:
        cases, failures = getattr(importlib.import_module(module), function)()
        found = {"cases": cases, "failures": failures}
    except NotImplementedError as error:
        found = {"unsupported": str(error).partition("\n")[0]}
    if task.device == "cuda":
        torch.cuda.synchronize()  # a kernel that is still to fail, fails here
    Path(task.result).write_text(json.dumps(found), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    run(Task(**json.loads(argv[0])))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
