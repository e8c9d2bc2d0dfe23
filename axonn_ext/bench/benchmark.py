"""Makes a command from a benchmark of several systems on one rank: its columns, cases and run.

Such a benchmark is a `Benchmark`. Benchmarks of several ranks share its options and the rows of
`output`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from axonn_ext.bench.output import (
    check_outputs,
    dots,
    exit_status,
    noisy,
    print_titled,
    style_of,
    subtitle,
    threads,
    write_plot,
)
from axonn_ext.bench.results import content_of
from axonn_ext.calibrate.measure import ROUNDS, Timing, measure, ranks_of, synchronize_with
from axonn_ext.calibrate.this_machine import check_device, default_device, describe_machine
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.terminal.arguments import MOST_THREADS, new_parser, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.memory import memory_problem
from axonn_ext.terminal.rows import Column, RowsFile, RowsTable

DEVICES = ("cpu", "cuda")
T = TypeVar("T")


# --- The command line ----------------------------------------------------------------------------


def add_device(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Adds --device; `default_device` fills it in if it is not given. note: ends its help."""
    parser.add_argument(
        "--device", choices=DEVICES,
        help=f"device to run on{note} (default: cuda if there is a GPU, else cpu)",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Adds --json. when: says when the file is written."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write machine and rows to a JSON file{when}"
    )


def add_run_options(
    parser: argparse.ArgumentParser, *, rounds: int = ROUNDS, json: str = "", plots: bool = True
) -> None:
    """Adds --rounds, --json and --plot. json: says when the file is written."""
    add = parser.add_argument
    add("--rounds", type=whole(), default=rounds, metavar="N",
        help="number of rounds; everything takes one turn per round (default: "
        "%(default)s)")  # fmt: skip
    add_json(parser, json)
    if plots:
        add("--plot", type=Path, metavar="FILE", help="draw a chart to a .png, .svg or .pdf file")


def check_memory(what: str, num_bytes: float, device: str) -> None:
    """Raises UserError if all ranks of this host together need more memory than it has."""
    if problem := memory_problem(what, num_bytes, device):
        raise UserError(problem)


# --- Rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SystemRow:
    """One system, on one rank. Times are per call, in microseconds.

    problem                    what is wrong; "" if it is correct. A wrong system has no time
    median_us, iqr_us, min_us  median, interquartile range and minimum over the rounds
    floor_us                   the time to move the bytes that must be moved, at the speed of a copy
                               or of a pass in place, timed in turns with the calls
    ratio_to_floor             median_us / floor_us
    """

    op: str
    device: str
    dtype: str
    system: str
    problem: str
    median_us: float | None
    iqr_us: float | None
    min_us: float | None
    floor_us: float
    ratio_to_floor: float | None
    rounds: int
    threads: int

    @property
    def correct(self) -> bool:
        return not self.problem

    @property
    def name(self) -> str:
        """The system's name in a sentence."""
        return self.system

    @property
    def where(self) -> str:
        """The hardware that the system ran on, in words."""
        return self.device if self.device == "cuda" else threads(self.threads)


R = TypeVar("R", bound=SystemRow)


def take_turns(
    calls: Mapping[str, Callable[[], T]], device: str, *, rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing[T]]:  # fmt: skip
    """Times calls on the device, in turns; all ranks must call this."""
    return measure(
        calls, ranks_of(device), rounds=rounds, on_round=on_round,
        synchronize=synchronize_with(device),
    )  # fmt: skip


def shared_fields(timing: Timing[Any] | None, floor_us: float, rounds: int) -> dict[str, Any]:
    """Returns the fields of a `SystemRow` that depend on its times; None: it got no time."""
    return {
        "median_us": timing.median_us if timing else None,
        "iqr_us": timing.iqr_us if timing else None,
        "min_us": timing.min_us if timing else None,
        "floor_us": floor_us,
        "ratio_to_floor": timing.median_us / floor_us if timing else None,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def ratio_of_rounds(samples: Sequence[float], base: Sequence[float]) -> float | None:
    """Returns the median of samples / base per round, which slow spells affect least."""
    if not samples or not base:
        return None
    return statistics.median(t / b for t, b in zip(samples, base, strict=True))


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def columns_in_ms(digits: int) -> dict[str, Callable[[R], str]]:
    """Returns the columns of the three times of a `SystemRow`, in milliseconds."""

    def in_ms(us: float | None) -> str:
        return number(None if us is None else us / 1e3, digits)

    return {
        "ms": lambda row: in_ms(row.median_us),
        "spread": lambda row: in_ms(row.iqr_us),
        "min": lambda row: in_ms(row.min_us),
    }


# --- The benchmark -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark(Generic[R]):
    """Systems that one process checks, and times in turns.

    summary, description, epilog   the texts of --help
    columns      title of each column -> the cell of a row. The first `num_names` have text; the
                 next one has a time, which is missing for a wrong system
    title        the title of the table of a group of rows. Without it, all groups are in one table,
                 whose rows are printed one by one in columns of these `widths`
    legend       the text below all tables
    add_options  adds the options that only this benchmark has
    check        raises UserError for a case that cannot be timed
    run          yields groups of rows that were timed together. It gets the arguments, and a
                 function to call after each round
    operands     the tensors whose dtype --dtype sets
    draw         draws all rows, with a line of small text, into a file; None: there is no chart
    """

    name: str
    summary: str
    description: str
    epilog: str
    columns: Mapping[str, Callable[[R], str]]
    add_options: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    run: Callable[[argparse.Namespace, Callable[[], None]], Iterable[list[R]]]
    title: Callable[[R], str] | None = None
    widths: Sequence[int] = ()
    num_names: int = 1
    legend: str = ""
    draw: Callable[[Sequence[R], str, Path], None] | None = None
    operands: str = "operands"
    dtypes: Sequence[str] = ("bf16", "fp16", "fp32")
    rounds: int = ROUNDS

    def add_parser(self, benchmarks: argparse._SubParsersAction[Any]) -> None:
        """Adds the subcommand."""
        parser = new_parser(
            benchmarks, self.name, self.run_command,
            help=self.summary, description=self.description, epilog=self.epilog,
        )  # fmt: skip
        self.add_options(parser)
        add = parser.add_argument
        add("--dtype", choices=self.dtypes, default="bf16",
            help=f"dtype of the {self.operands} (default: %(default)s)")  # fmt: skip
        add_device(parser)
        add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
            help="number of CPU threads; 0: one per core (default: %(default)s)")  # fmt: skip
        add_run_options(
            parser, rounds=self.rounds, json=", updated after each group of rows",
            plots=self.draw is not None,
        )  # fmt: skip

    def run_command(self, args: argparse.Namespace) -> int:
        """Runs the command; returns 1 if a system is wrong. Raises UserError for a mistake."""
        if process.this_process() is not None:
            raise UserError(f"bench {self.name} runs in one process; start it without torchrun")
        args.device = args.device or default_device()
        check_device(args.device)
        check_outputs(args)
        self.check(args)
        here, console = Process(), Console()
        machine = describe_machine(
            threads=process.set_threads(here, args.threads), device=args.device
        )
        rows: list[R] = []
        show = self._shower(console)
        with (
            RowsFile("--json", args.json) as file,
            process.process_group(here, dist.HashStore(), args.device),
        ):
            for group in self.run(args, dots(console, here)):
                show(group)
                rows += group
                file.write(content_of(machine, rows))
        for line in () if self.title else self.notes(rows):
            say(console, line)
        if self.legend:
            say(console, self.legend, style="dim")
        line = subtitle(machine, threads(rows[0].threads))
        write_plot(args, console, draw=self.draw and partial(self.draw, rows, line))
        return exit_status(rows)

    def _shower(self, console: Console) -> Callable[[Sequence[R]], None]:
        """Returns a function that prints the rows of a group."""
        if (title := self.title) is not None:
            return lambda group: print_titled(
                console, title(group[0]), list(self.columns),
                [(self.cells(row), style_of(correct=row.correct)) for row in group],
                self.notes(group),
            )  # fmt: skip
        table = RowsTable(console, [
            Column(column, width, is_number=place >= self.num_names)
            for place, (column, width) in enumerate(zip(self.columns, self.widths, strict=True))
        ])  # fmt: skip

        def add(group: Sequence[R]) -> None:
            for row in group:
                table.add(self.cells(row), style_of(correct=row.correct))

        return add

    def cells(self, row: R) -> list[str]:
        """Returns the row's cells of the table."""
        cells = [cell(row) for cell in self.columns.values()]
        if row.problem:
            cells[self.num_names] = "wrong"
        return cells

    def notes(self, rows: Sequence[R]) -> list[str]:
        """Returns what is wrong, and reasons to mistrust the numbers."""
        wrong = [f"{row.name} gets no time: {row.problem}" for row in rows if row.problem]
        return wrong + noisy((row.name, row.median_us, row.iqr_us) for row in rows)
