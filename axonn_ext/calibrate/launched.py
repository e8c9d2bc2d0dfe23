"""The processes of a benchmark: they run a plan from a folder, where rank 0 leaves its result."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PLAN_FILE, RESULT_FILE = "plan", "result"


def start(command: str, plan: DataclassInstance, num_ranks: int) -> Any:
    """Starts the processes of `bench COMMAND` for a plan, a dataclass; returns rank 0's result.

    They get --worker FOLDER, and call `do_plan`. Raises what `launch` raises.
    """
    with tempfile.TemporaryDirectory(prefix="axonn_ext_bench_") as name:
        folder = Path(name)
        (folder / PLAN_FILE).write_bytes(pickle.dumps(plan))
        launch(num_ranks, ["bench", command, "--worker", name])
        return pickle.loads((folder / RESULT_FILE).read_bytes())


def do_plan(folder: Path, here: Process, work: Callable[[Any], object]) -> None:
    """Does the work of the plan in the folder; rank 0 leaves its result."""
    result = work(pickle.loads((folder / PLAN_FILE).read_bytes()))
    if here.rank == 0:
        (folder / RESULT_FILE).write_bytes(pickle.dumps(result))


@contextmanager
def meeting(
    command: str, plan: DataclassInstance, here: Process, device: str, *, threads: int = 1
) -> Iterator[None]:
    """Runs its body in a process group of ranks with the same plan and number of threads.

    threads: 0: each rank's share of the cores
    Raises: UserError if another rank has found a mistake by the user.
    """
    store = process.open_store(here)
    process.meet(store, here, lambda: process.plan_values(f"bench {command}", plan))
    process.set_threads(here, threads)
    with process.process_group(here, store, device):
        yield
