"""`axonn-ext plan --like`: the best choices of other frameworks next to ours."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from axonn_ext.cli.plan import cells, files
from axonn_ext.cli.plan.budget import Budget
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.search.frameworks import FRAMEWORKS, plan_framework, plan_with_all
from axonn_ext.planner.search.request import Request
from axonn_ext.terminal.console import new_table, print_table, say

_ALL = "all"
OURS, ALL_OURS = "ours", "ours, with all of these"


@dataclass(frozen=True)
class Row:
    """The best configuration that a framework can choose; or None, and the reason."""

    name: str
    best: Estimate | None
    problem: str = ""


def parse_like(text: str) -> tuple[str, ...]:
    """Returns the names of frameworks in a text like "megatron,fsdp" or "all"."""
    names = tuple(FRAMEWORKS) if text == _ALL else tuple(text.split(","))
    if not set(names) <= set(FRAMEWORKS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected {_ALL}, or some of {', '.join(FRAMEWORKS)} with commas between, got {text!r}"
        )
    return names


def plan_rows(names: tuple[str, ...], request: Request, ours: Estimate) -> list[Row]:
    """Returns ours, ours with all that the others have, and the frameworks of these names.

    ours: the fastest configuration of the request.
    """
    frameworks = []
    for name in names:
        try:
            frameworks.append(Row(name, plan_framework(FRAMEWORKS[name], request)))
        except PlannerError as error:
            frameworks.append(Row(name, None, str(error)))
    found = [row.best for row in frameworks if row.best is not None]
    return [Row(OURS, ours), Row(ALL_OURS, plan_with_all(request, [ours, *found])), *frameworks]


def print_like(console: Console, rows: list[Row]) -> None:
    """Prints the table, and the source for what each framework has."""
    ours = rows[0].best
    assert ours is not None
    heads = ("like", "grid", "micro-batches", "options", "step",
             cells.PEAK_TITLE, "exposed", "memory", "step over ours")  # fmt: skip
    table = new_table(heads, ("like", "grid", "options", "exposed"))
    for row in rows:
        e = row.best
        table.add_row(row.name, *(["-"] if e is None else _cells(e, ours)))
    say(console, "")
    say(
        console,
        "the fastest choices of other frameworks, with our models of kernels, links and memory:",
    )
    say(console, "")
    print_table(console, table)
    say(console, "")
    say(console, f"{ALL_OURS}: may also have the stages, ZeRO and offload of the others")
    for row in rows:
        if row.name not in FRAMEWORKS:
            continue
        framework = FRAMEWORKS[row.name]
        say(console, f"{row.name}: {framework.takes} ({framework.source})")
        if row.problem:
            say(console, f"{row.name}: {row.problem}")


def _cells(e: Estimate, ours: Estimate) -> list[str]:
    return [
        e.job.grid.short(), cells.micro_batches(e.job), cells.options(e.job),
        cells.duration(e.step_time_s), cells.peak(e),
        cells.exposed(e), cells.gigabytes(e.memory.total),
        f"{e.step_time_s / ours.step_time_s:.2f}",
    ]  # fmt: skip


def as_json(rows: list[Row], machine: Machine, budget: Budget) -> list[dict[str, Any]]:
    """Returns the rows as docs/interfaces.md describes them."""
    return [
        {
            "like": row.name,
            "config": row.best and files.config_as_json(row.best, machine, budget),
            "problem": row.problem or None,
        }
        for row in rows
    ]
