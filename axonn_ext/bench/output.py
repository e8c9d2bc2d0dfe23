"""What the benchmarks' commands show and write in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axonn_ext.bench.results import Json, write_json
from axonn_ext.launch.place import Process
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.files import writing


def dots(console: Console, here: Process) -> Callable[[], None]:
    """Returns a function that shows on rank 0's terminal that a round has passed."""
    if here.rank != 0 or not console.is_terminal:
        return lambda: None
    return lambda: console.print(".", end="", style="dim")


def write_files(
    args: argparse.Namespace,
    console: Console,
    *,
    machine: Json,
    rows: Sequence[Any],
    summary: Sequence[Any] | None = None,
    draw: Callable[[Path], None],
) -> None:
    """Writes what --json and --plot ask for, and says so. rows, summary: dataclasses."""
    if args.json is not None:
        write_json(args.json, machine, rows, summary)
    if args.plot is not None:
        with writing("--plot", args.plot):
            draw(args.plot)
    written = [str(path) for path in (args.json, args.plot) if path is not None]
    if written:
        say(console, f"written: {', '.join(written)}", style="dim")


def subtitle(machine: Json, *details: str) -> str:
    """Returns a line for a chart: the machine, what is special to the run, and the versions."""
    facts = (
        machine.get("gpu", machine["cpu"]), f"{machine['cores']} cores", *details,
        f"torch {machine['torch']}", f"axonn_ext {machine['axonn_ext']}",
    )  # fmt: skip
    return ", ".join(map(str, facts))
