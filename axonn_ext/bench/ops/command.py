"""`axonn-ext bench ops`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_ext.bench.ops.cases import CASES, Sizes
from axonn_ext.bench.ops.run import OpRow, run_case
from axonn_ext.bench.output import NOISY, dots, noisy
from axonn_ext.bench.results import content_of
from axonn_ext.calibrate.measure import ROUNDS
from axonn_ext.calibrate.this_machine import check_device, default_device, describe_machine
from axonn_ext.grid import Grid
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.terminal.arguments import MOST_THREADS, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.rows import Column, RowsFile, RowsTable
from axonn_ext.train.memory import memory_problem

DEVICES = ("cpu", "cuda")
OF_FLOATS = ("bf16", "fp16", "fp32")
# Enough that a GPU's caches hold little of what a call moves, and that a CPU takes some seconds.
ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
ROWS = {"cpu": 256, "cuda": 4096}
# Bytes at the peak. Of an element: state, weights and gradients of two optimizers, and the copy's.
# Of a logit: three of its own dtype, and torch's three of fp32.
_OF_AN_ELEMENT, _OF_A_LOGIT = 16 + 16 + 4 + 8, 12
_COLUMNS = (
    Column("op", 12),
    Column("dtype"),
    Column("shape", 22),
    Column("system", 9),
    Column("median us", 11, is_number=True),
    Column("spread", 9, is_number=True),
    Column("min", 11, is_number=True),
    Column("GB/s", 7, is_number=True),
    Column("copy GB/s", is_number=True),
    Column("x floor", is_number=True),
    Column("vs torch", is_number=True),
)
DESCRIPTION = """\
Times ops that move much memory and compute little, on one rank: sums of slots, as fused
reduce-scatters make them; initial values from Philox; cross-entropy; a
step of AdamW. Each takes turns with torch's own way and with a copy. The floor of an op is the time
that the bytes which it must move take at the speed of this copy. A result that is wrong gets no
time, and the exit status is 1. docs/benchmarks.md tells how to read the numbers."""
EPILOG = """\
examples:
  axonn-ext bench ops
  axonn-ext bench ops --op reduce adamw --dtype fp32 --json ops.json
  axonn-ext bench ops --device cpu --threads 0 --elements 1e8
"""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = benchmarks.add_parser(
        "ops", help="ops that move memory, against torch's and the speed of a copy",
        description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--op", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="OP",
        help=f"(default: {' '.join(CASES)})")  # fmt: skip
    add("--elements", type=whole(), metavar="N",
        help="elements that are added up, filled or updated; an eighth as many tokens get labels "
        f"(default: {ELEMENTS['cuda']} on GPUs, {ELEMENTS['cpu']} on CPUs)")  # fmt: skip
    add("--slots", type=whole(1, 256), default=8, metavar="N",
        help="slots, one for each rank of a reduction (default: %(default)s)")  # fmt: skip
    add("--rows", type=whole(), metavar="N", help="rows of the logits "
        f"(default: {ROWS['cuda']} on GPUs, {ROWS['cpu']} on CPUs)")  # fmt: skip
    add("--vocab", type=whole(2), default=50_304, metavar="N",
        help="columns of the logits (default: %(default)s)")  # fmt: skip
    add("--dtype", choices=OF_FLOATS, default="bf16", help="(default: %(default)s)")
    add("--device", choices=DEVICES, default=default_device(), help="(default: %(default)s)")
    add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
        help="threads; 0: one for each core (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole(), default=ROUNDS, metavar="N",
        help="batches of calls of each way (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write machine and rows to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises UserError for a mistake of the user."""
    refuse_extra("bench ops", extra)
    sizes = _sizes(args)
    here, console = Process(), Console()
    used = process.set_threads(here, args.threads)
    machine = describe_machine(threads=used, device=args.device)
    rows: list[OpRow] = []
    with (
        RowsFile("--json", args.json) as file,
        process.process_group(here, dist.HashStore(), args.device),
    ):
        grid, table = Grid(), RowsTable(console, _COLUMNS)
        for op in dict.fromkeys(args.op):
            found = run_case(
                CASES[op](sizes, grid), device=args.device, copied_bytes=4 * sizes.elements,
                rounds=args.rounds, on_round=dots(console, here),
            )  # fmt: skip
            for row in found:
                table.add(cells(row), "bold red" if row.problem else "")
            rows += found
            file.write(content_of(machine, rows))
    for note in notes(rows):
        say(console, note)
    return 1 if any(row.problem for row in rows) else 0


def _sizes(args: argparse.Namespace) -> Sizes:
    """Returns what is timed. Raises UserError for what cannot be."""
    if process.this_process() is not None:
        raise UserError("bench ops runs in one process; not under torchrun")
    check_device(args.device)
    check_writable("--json", args.json)
    sizes = Sizes(
        elements=args.elements or ELEMENTS[args.device], slots=args.slots,
        rows=args.rows or ROWS[args.device], vocab=args.vocab, dtype=args.dtype,
        device=args.device,
    )  # fmt: skip
    logits = sizes.rows * sizes.vocab
    for what, num_bytes in (
        (f"--elements {sizes.elements}", sizes.elements * (_OF_AN_ELEMENT + 2 * sizes.width)),
        (f"--rows {sizes.rows} --vocab {sizes.vocab}", logits * (_OF_A_LOGIT + 3 * sizes.width)),
    ):
        problem = memory_problem(what, num_bytes, args.device)
        if problem:
            raise UserError(problem)
    return sizes


def cells(row: OpRow) -> tuple[str, ...]:
    """Returns the row's cells of the table."""
    shape = ",".join(f"{name}={size}" for name, size in row.shape.items())
    head, copy = (row.op, row.dtype, shape, row.system), f"{row.copy_gbps:,.1f}"
    if row.median_us is None or row.iqr_us is None or row.min_us is None:
        return (*head, "wrong", "-", "-", "-", copy, "-", "-")
    ratios = (row.ratio_to_floor, row.speedup)
    return (
        *head,
        *(f"{us:,.1f}" for us in (row.median_us, row.iqr_us, row.min_us)),
        f"{row.moved_bytes / row.median_us / 1e3:,.1f}",
        copy,
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    )


def notes(rows: Sequence[OpRow]) -> list[str]:
    """Returns what is wrong, and why numbers may be less meaningful than they seem."""
    wrong = [f"{row.op} of {row.system} gets no time: {row.problem}" for row in rows if row.problem]
    spread = [
        f"{row.op} of {row.system}"
        for row in rows
        if row.median_us and (row.iqr_us or 0) > NOISY * row.median_us
    ]
    return wrong + noisy(spread)
