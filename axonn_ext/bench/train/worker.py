"""Runs one process of a launch: it meets its peers and measures; rank 0 writes the result."""

# `run` is imported only where it is needed: torch's distributed training takes a second to load,
# which would slow down `axonn-ext --help`.
from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from axonn_ext.bench.train.plan import Plan
from axonn_ext.bench.train.results import Row, rows_to_values
from axonn_ext.launch import process
from axonn_ext.launch.place import Process

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"


def run_folder(
    folder: Path, here: Process, on_round: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Does what the plan in the folder says; rank 0 writes the result there."""
    plan = Plan.from_json((folder / PLAN_FILE).read_text())
    from axonn_ext.bench.train.run import time_systems, weigh_system

    with _ranks(plan, here):
        if plan.what == "memory":
            result: object = dataclasses.asdict(weigh_system(plan))
        else:
            result = rows_to_values(time_systems(plan, on_round, tell=tell))
    if here.rank == 0:
        (folder / RESULT_FILE).write_text(json.dumps(result))


def leave(status: int) -> NoReturn:
    """Ends this process at once.

    Torch's caches of meshes keep gloo's threads alive until the end. If such a thread frees a
    tensor while Python shuts down, Python stops the thread at a place where C++ can only abort.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_here(
    plan: Plan, here: Process, on_round: Callable[[], None], tell: Callable[[str], None]
) -> list[Row]:
    """Times the systems of a plan in the processes that torchrun started."""
    from axonn_ext.bench.train.run import time_systems

    with _ranks(plan, here):
        return time_systems(plan, on_round, tell=tell)


@contextmanager
def _ranks(plan: Plan, here: Process) -> Iterator[None]:
    store = process.open_store(here)
    process.meet(store, here, lambda: process.plan_values("bench train", plan))
    torch.set_num_threads(1)  # `single` sets more threads for its own steps
    with process.process_group(here, store, plan.device):
        yield
