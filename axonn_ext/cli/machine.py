"""`axonn-ext machine`: a machine's file for the planner, with links that nccl-tests measured."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext.calibrate.file import LinkRow
from axonn_ext.calibrate.find_machine import find_machine, measured_file
from axonn_ext.calibrate.nccl_tests import KINDS, read_log
from axonn_ext.calibrate.with_links import level_of, levels_of, with_links
from axonn_ext.planner.machines.machine import Machine, machine_file
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_text
from axonn_ext.terminal.arguments import new_parser
from axonn_ext.terminal.console import Console, new_table, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable, write_text

DESCRIPTION = """\
Writes a machine file for axonn-ext plan: that of a known machine, with the bandwidths and latencies
that nccl-tests (or rccl-tests) measured on yours. Needs no GPU."""

EPILOG = """\
examples:
  mpirun -np 64 all_gather_perf -b 1K -e 8G -f 2 > ag64.log
  NCCL_TESTS_SPLIT=%8 mpirun -np 64 all_gather_perf -b 1K -e 8G -f 2 > ag8x8.log
  axonn-ext machine --base dgx-h100 --log all_gather=ag64.log --log all_gather=ag8x8.log \\
      --out lab.toml
  axonn-ext plan --model llama3-8b --gpus 64 --machine lab.toml --global-batch 512

The first log measures one group of all GPUs; the second, groups of every eighth GPU, all at once,
as z and data form them if x is 8. Ranks must be numbered node by node."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "machine", run, description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("--base", required=True, metavar="NAME|FILE.toml",
        help="machine that provides all other numbers: a known one or a file, as for axonn-ext "
        "plan")  # fmt: skip
    add("--log", type=_log, action="append", required=True, metavar="KIND=FILE",
        help=f"output of one nccl-tests run, and its collective: {', '.join(KINDS)}; may be given "
        "several times")  # fmt: skip
    add("--out", type=Path, required=True, metavar="FILE.toml", help="machine file to write")


def _log(text: str) -> tuple[str, Path]:
    kind, equals, file = text.partition("=")
    if kind not in KINDS or not equals or not file:
        raise argparse.ArgumentTypeError(
            f"expected KIND=FILE with KIND one of {', '.join(KINDS)}, got {text!r}"
        )
    return kind, Path(file)


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    if args.out.suffix != ".toml":
        raise UserError(f"--out: expected a name ending in .toml, got {args.out}")
    check_writable("--out", args.out)
    try:
        machine = find_machine(args.base)
        rows, ranks = _read_logs(args.log, machine)
        names = ", ".join(file.name for _, file in args.log)
        source = f"links measured by nccl-tests ({json.dumps(names)[1:-1]})"
        text = with_links(_text(args.base), rows, source)
    except InputError as error:
        raise UserError(str(error)) from None
    write_text("--out", args.out, text)
    console = Console()
    _print(console, machine, rows, ranks)
    say(console, "")
    say(console, f"written: {args.out}")
    return 0


def _text(name: str) -> str:
    """Returns the text of a machine's file, with its base's levels if it has none."""
    text = read_text(machine_file(name, this_file=measured_file()))
    values = tomllib.loads(text)
    return (
        text
        if "levels" in values or "base" not in values
        else text + levels_of(_text(values["base"]))
    )


def _read_logs(
    logs: Sequence[tuple[str, Path]], machine: Machine
) -> tuple[list[tuple[str, LinkRow]], list[int]]:
    """Returns each log's measurements with their level of links, and its number of ranks.

    Raises InputError for two logs of the same collective and groups.
    """
    rows: list[tuple[str, LinkRow]] = []
    ranks = []
    seen: dict[tuple[int, int, str], Path] = {}
    for kind, path in logs:
        row, num_ranks = read_log(path, kind)
        group = row.inner, row.size, kind
        if group in seen:
            raise InputError(
                f"--log: {seen[group]} and {path} both have {kind} of {row.size} ranks at a "
                f"distance of {row.inner}"
            )
        seen[group] = path
        rows.append((level_of(machine, row, num_ranks), row))
        ranks.append(num_ranks)
    return rows, ranks


def _print(
    console: Console, machine: Machine, rows: list[tuple[str, LinkRow]], ranks: list[int]
) -> None:
    heads = ("collective", "level", "inner", "ranks", "GB/s", f"GB/s of {machine.name}",
             "latency of a step, us", "misfit")  # fmt: skip
    table = new_table(heads, ("collective", "level"))
    for (level, row), num_ranks in zip(rows, ranks, strict=True):
        known = machine.links.of(row.inner, row.size, "x", num_ranks)
        table.add_row(
            row.kind, level, str(row.inner), str(row.size), f"{row.line.bytes_per_s / 1e9:,.2f}",
            f"{known.bytes_per_s / 1e9:,.2f}", f"{row.latency_s * 1e6:,.2f}",
            f"{row.line.error:.0%}",
        )  # fmt: skip
    print_table(console, table)
