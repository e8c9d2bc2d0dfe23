"""`axonn-ext compare`: compares the losses of two runs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from axonn_ext.terminal.arguments import new_parser, number
from axonn_ext.terminal.console import Console, plain_table, say
from axonn_ext.terminal.files import check_writable, writing
from axonn_ext.train.compare import Comparison, Pair, compare
from axonn_ext.train.plot import draw_comparison
from axonn_ext.train.run_folder import COMPARE_PICTURE

DEFAULT_TOLERANCE = 1e-3
NUM_ROWS = 10

DESCRIPTION = """\
Compares the training losses of RUN and REFERENCE step by step. Prints a table and the largest
relative difference, and draws RUN/compare.png. Exit status 1 if the difference is above the
tolerance."""

EPILOG = """\
example:
  axonn-ext compare runs/demo runs/demo-plain --tolerance 1e-3
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "compare", run, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "reference", type=Path, metavar="REFERENCE", help="folder of the run to compare with"
    )
    parser.add_argument(
        "--tolerance", type=number(least=0), default=DEFAULT_TOLERANCE, metavar="R",
        help="largest relative difference of losses that counts as equal (default: %(default)g)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 if the runs differ by more than the tolerance."""
    comparison = compare(args.folder, args.reference)
    picture = args.folder / COMPARE_PICTURE if importlib.util.find_spec("matplotlib") else None
    check_writable("RUN", picture)
    console = Console()
    print_table(console, comparison)
    worst = comparison.worst
    equal = worst.difference <= args.tolerance
    lines = []
    if len(set(comparison.num_steps)) > 1:
        a, b = comparison.num_steps
        lines.append(f"only the {len(comparison.pairs)} common steps of {a} and {b} are compared")
    sign, verdict = ("<=", "equal") if equal else (">", "different")
    lines.append(
        f"largest relative difference of {len(comparison.pairs)} steps: {worst.difference:.2e} "
        f"at step {worst.step} ({sign} {args.tolerance:g}: {verdict})"
    )
    if picture is not None:
        with writing("RUN", picture):
            draw_comparison(comparison, subtitle=lines[-1]).savefig(picture)
        lines.append(f"written: {picture}")
    for line in lines:
        say(console, line)
    return 0 if equal else 1


def print_table(console: Console, comparison: Comparison) -> None:
    """Prints the losses of some steps.

    On a narrow terminal, names are wrapped, but numbers never are.
    """
    rows = [_cells(pair) for pair in comparison.some_pairs(NUM_ROWS)]
    last = [_cells(pair) for pair in comparison.evaluations[-1:]]
    names = ("step", comparison.name, comparison.reference_name, "relative difference")
    widths = [max(map(len, column)) for column in zip(*rows, *last, strict=True)]
    widths[0] = max(widths[0], len("held-out"))
    gap = 4 if console.width >= sum(widths) + 4 * len(names) else 1
    table = plain_table(padding=(0, gap, 0, 0))
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, justify="right", min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    for step, *losses in last:
        table.add_row(f"held-out text, {step}", *losses, style="cyan")
    least = sum(widths) + gap * len(names)
    console.print(table, width=max(least, console.width), crop=False)


def _cells(pair: Pair) -> tuple[str, str, str, str]:
    return str(pair.step), f"{pair.loss:.6f}", f"{pair.reference:.6f}", f"{pair.difference:.1e}"
