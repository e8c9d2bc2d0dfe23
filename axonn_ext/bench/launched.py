"""The processes of a benchmark: they run a plan from a folder, where rank 0 leaves its result.

A plan is a dataclass of plain values, dataclasses, and tuples of them.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"
P = TypeVar("P", bound="DataclassInstance")
T = TypeVar("T")


def start(command: str, plan: DataclassInstance, num_ranks: int) -> Any:
    """Starts the processes of `bench COMMAND` for a plan; returns rank 0's result in plain values.

    They get --worker FOLDER, and call `do_plan`. Raises what `launch` raises.
    """
    with tempfile.TemporaryDirectory(prefix="axonn_ext_bench_") as name:
        folder = Path(name)
        (folder / PLAN_FILE).write_text(to_json(plan))
        launch(num_ranks, ["bench", command, "--worker", name])
        return json.loads((folder / RESULT_FILE).read_text())


def do_plan(folder: Path, here: Process, kind: type[P], work: Callable[[P], object]) -> None:
    """Does the work of the plan in the folder, which has that type; rank 0 leaves its result."""
    result = work(from_json(kind, (folder / PLAN_FILE).read_text()))
    if here.rank == 0:
        (folder / RESULT_FILE).write_text(to_json(result))


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


def to_json(value: Any) -> str:
    """Returns the JSON of plain values, dataclasses, and lists of them."""
    return json.dumps(value, default=dataclasses.asdict)


def from_json(kind: type[T], text: str) -> T:
    """Returns the value that `to_json` was given, which had that type."""
    return from_plain(kind, json.loads(text))


def from_plain(kind: type[T], value: Any) -> T:
    """Returns a value of that type from the dicts and lists that it became in JSON."""
    found: T = _from_plain(kind, value)
    return found


def _from_plain(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin is UnionType:
        (some,) = (argument for argument in arguments if argument is not NoneType)
        return _from_plain(some, value)
    if origin in (list, tuple):
        fixed = origin is tuple and arguments[-1] is not ...
        return origin(map(_from_plain, arguments if fixed else repeat(arguments[0]), value))
    if dataclasses.is_dataclass(kind):
        kinds, make = get_type_hints(kind), cast(Callable[..., Any], kind)
        return make(**{name: _from_plain(kinds[name], each) for name, each in value.items()})
    return value
