"""`axonn-ext plan --sensitivity`: how step and best grid change with the machine's links."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from axonn_ext.cli.plan import cells
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.sensitivity import Variant
from axonn_ext.terminal.console import new_table, print_table, say


def print_sensitivity(console: Console, variants: list[Variant], best: Estimate) -> None:
    """Prints a row for each change of the machine."""
    heads = ("if", "its step", "", "best grid then", "step", "slower than it")
    table = new_table(heads, ("if", "best grid then"))
    for v in variants:
        change = v.same.step_time_s / best.step_time_s - 1
        table.add_row(
            v.what, cells.duration(v.same.step_time_s), f"{change:+.1%}",
            v.best.job.grid.short(), cells.duration(v.best.step_time_s),
            f"{v.same.step_time_s / v.best.step_time_s - 1:.1%}",
        )  # fmt: skip
    say(console, "")
    say(
        console,
        f"number 1, {best.job.grid.short()} ({cells.duration(best.step_time_s)}), if the "
        "machine differs, and what would be best then:",
    )
    say(console, "")
    print_table(console, table)


def as_json(variants: list[Variant]) -> list[dict[str, Any]]:
    """Returns the rows as docs/interfaces.md describes them."""
    return [
        {
            "if": v.what,
            "step_time_s": v.same.step_time_s,
            "best_grid": v.best.job.grid.as_dict(),
            "best_step_time_s": v.best.step_time_s,
        }
        for v in variants
    ]
