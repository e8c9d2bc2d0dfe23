"""Runs one process of a launch: it meets its peers and measures; rank 0 writes the result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from axonn_ext.bench.pipeline.plan import Plan
from axonn_ext.bench.pipeline.results import Row
from axonn_ext.launch import process
from axonn_ext.launch.place import Process

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"


def run_folder(folder: Path, here: Process, on_round: Callable[[], None]) -> None:
    """Does what the plan in the folder says; rank 0 writes the rows there."""
    plan = Plan.from_json((folder / PLAN_FILE).read_text())
    rows = run_here(plan, here, on_round)
    if here.rank == 0:
        values = [dataclasses.asdict(row) for row in rows]
        (folder / RESULT_FILE).write_text(json.dumps(values))


def run_here(plan: Plan, here: Process, on_round: Callable[[], None]) -> list[Row]:
    """Times the cases of a plan in the processes that exist already."""
    from axonn_ext.bench.pipeline.run import time_cases

    store = process.open_store(here)
    process.meet(store, here, lambda: process.plan_values("bench pipeline", plan))
    process.set_threads(here, 1)
    with process.process_group(here, store):
        return time_cases(plan, on_round)
