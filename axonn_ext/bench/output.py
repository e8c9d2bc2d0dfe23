"""Output that the benchmarks' commands share: tables, notes and files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import rich.console

from axonn_ext.bench.results import Json
from axonn_ext.ranks.launch.place import Process
from axonn_ext.terminal.console import Console, new_table, print_table, say
from axonn_ext.terminal.files import check_picture, check_writable, writing

NOISY = 0.1  # if the middle half exceeds this share of the median, small differences mean nothing


def check_outputs(args: argparse.Namespace) -> None:
    """Raises UserError for a --json or a --plot that cannot be written."""
    check_writable("--json", args.json)
    check_picture("--plot", getattr(args, "plot", None))


def print_titled(
    console: rich.console.Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[str], str]],
    notes: Sequence[str],
) -> None:
    """Prints a table with a title above and notes below. rows: cells, and their style.

    The first column has names, and the others have numbers.
    """
    say(console, title, style="bold")
    table = new_table(columns, gap=4)
    for cells, style in rows:
        table.add_row(*cells, style=style)
    print_table(console, table)
    for note in notes:
        say(console, note)
    say(console, "")


def style_of(*, correct: bool) -> str:
    """Returns the style of a row of a table."""
    return "" if correct else "bold red"


def noisy(systems: Iterable[tuple[str, float | None, float | None]]) -> list[str]:
    """Returns a caution about systems whose interquartile range is above NOISY of their median.

    systems: names, medians and interquartile ranges; systems without a time are left out.
    """
    names = [name for name, median, spread in systems if median and (spread or 0) > NOISY * median]
    if not names:
        return []
    return [
        f"noisy ({', '.join(names)}): a spread is above {NOISY:.0%} of its median; quiet the "
        "machine or raise --rounds before trusting small differences"
    ]


def exit_status(rows: Iterable[Any]) -> int:
    """Returns 1 if a row has a `problem`, else 0."""
    return 1 if any(row.problem for row in rows) else 0


def threads(count: int) -> str:
    """Returns a number of threads in words."""
    return f"{count} thread{'s' if count > 1 else ''}"


def dots(console: Console, here: Process) -> Callable[[], None]:
    """Returns a function that shows on rank 0's terminal that a round has passed."""
    if here.rank != 0 or not console.is_terminal:
        return lambda: None
    return lambda: console.print(".", end="", style="dim")


def write_plot(
    args: argparse.Namespace, console: Console, *, draw: Callable[[Path], None] | None
) -> None:
    """Writes the file of --plot, and says what --json and --plot have written."""
    plot = getattr(args, "plot", None)
    if plot is not None and draw is not None:
        with writing("--plot", plot):
            draw(plot)
    written = [str(path) for path in (args.json, plot) if path is not None]
    if written:
        say(console, f"written: {', '.join(written)}", style="dim")


def subtitle(machine: Json, *details: str) -> str:
    """Returns a line for a chart: the machine, what is special to the run, and the versions."""
    facts = (
        machine.get("gpu", machine["cpu"]), f"{machine['cores']} cores", *details,
        f"torch {machine['torch']}", f"axonn_ext {machine['axonn_ext']}",
    )  # fmt: skip
    return ", ".join(map(str, facts))
