"""Compares the grid of --grid with the best one, and says why their steps differ."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from axonn_ext.cli.plan import cells, explain
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.step.volumes import most_bytes_by_axis
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.terminal.console import new_table, print_table, say

_LEAST_SHARE = 0.05  # of the difference; smaller reasons appear only in the table


def print_beside(console: Console, asked: Estimate, best: Estimate, machine: Machine) -> None:
    """Prints how the fastest grid of --grid differs from the fastest of all."""
    say(console, "")
    if asked.job.grid == best.job.grid:
        say(console, "the best of all grids is among those of --grid")
        return
    more = asked.step_time_s / best.step_time_s - 1
    say(
        console,
        f"{asked.job.grid.short()} against the best of all grids, {best.job.grid.short()} "
        f"({cells.micro_batches(best.job)}; {cells.options(best.job)}): a step takes "
        f"{cells.duration(asked.step_time_s - best.step_time_s)} ({more:.1%}) longer"
        f"{_because(asked, best, machine)}",
    )
    say(console, "")
    print_table(console, _times(asked, best, machine))
    say(console, "")
    print_table(console, _axes(asked, best, machine))


def as_json(asked: Estimate, best: Estimate, machine: Machine) -> dict[str, Any]:
    """Returns where the time goes in the requested grid and in the best one, in seconds."""
    return {
        "grid": best.job.grid.as_dict(),
        "step_time_s": best.step_time_s,
        "seconds_by_kind": differences(asked, best, machine),
    }


def differences(asked: Estimate, best: Estimate, machine: Machine) -> dict[str, list[float]]:
    """Returns the seconds of each kind of work and wait, in the requested and the best grid."""
    kinds = [explain.time_kinds(e, machine) for e in (asked, best)]
    names = dict.fromkeys((*kinds[0], *kinds[1]))
    return {name: [of.get(name, 0.0) for of in kinds] for name in names}


def _because(asked: Estimate, best: Estimate, machine: Machine) -> str:
    """Names the kinds of work and wait that make the step longer, the largest first."""
    total = asked.step_time_s - best.step_time_s
    more = {k: a - b for k, (a, b) in differences(asked, best, machine).items()}
    reasons = sorted((k for k in more if more[k] > _LEAST_SHARE * total), key=lambda k: -more[k])
    return "".join(
        f"{', ' if place else ': '}{kind} {cells.duration(more[kind])}"
        for place, kind in enumerate(reasons)
    )


def _times(asked: Estimate, best: Estimate, machine: Machine) -> Table:
    table = new_table(("time of a step, ms", "--grid", "best", "more"))
    rows = differences(asked, best, machine) | {"step": [asked.step_time_s, best.step_time_s]}
    for name, (ours, theirs) in rows.items():
        numbers = (f"{ours * 1e3:,.2f}", f"{theirs * 1e3:,.2f}", f"{(ours - theirs) * 1e3:+,.2f}")
        table.add_row(name, *numbers, style="bold" if name == "step" else "")
    return table


def _axes(asked: Estimate, best: Estimate, machine: Machine) -> Table:
    """Returns a table of the ranks, bytes and bandwidth of each axis in both grids."""
    heads = [f"{what}, {whose}" for what in ("ranks", "GB sent", "GB/s")
             for whose in ("--grid", "best")]  # fmt: skip
    table = new_table(("axis", *heads))
    for axis in COMMUNICATING:
        grids = [e.job.grid for e in (asked, best)]
        ranks = [getattr(grid, axis) for grid in grids]
        if ranks == [1, 1]:
            continue
        sent = [most_bytes_by_axis(e.job).get(axis, 0) / 1e9 for e in (asked, best)]
        speeds = [machine.link(grid, axis).bytes_per_s / 1e9 for grid in grids]
        table.add_row(
            axis, *map(str, ranks), *(f"{n:,.3f}" for n in sent),
            *("-" if r == 1 else f"{n:,.1f}" for r, n in zip(ranks, speeds, strict=True)),
        )  # fmt: skip
    return table
