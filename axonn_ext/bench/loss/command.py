"""`axonn-ext bench loss`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_ext.bench.loss.plot import plot_rows
from axonn_ext.bench.loss.report import LEGEND, print_rows
from axonn_ext.bench.loss.results import LossRow
from axonn_ext.bench.loss.run import Case, run_case
from axonn_ext.bench.output import check_outputs, dots, subtitle, threads, write_files
from axonn_ext.calibrate.this_machine import (
    DTYPES,
    check_device,
    default_device,
    describe_machine,
)
from axonn_ext.grid import Grid
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.terminal.arguments import MOST_THREADS, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.train.memory import memory_problem

DEVICES = ("cpu", "cuda")
VOCABULARIES = (50_304, 128_256)  # of GPT-2, rounded up, and of Llama 3
# At the peak, of the logits' elements: they and a copy, torch's three of fp32 and a gradient.
_FP32_COPIES, _OWN_COPIES = 3, 3
DESCRIPTION = """\
Times the loss of a batch of logits and its gradient, on one rank: ours, which reads the logits in
their own dtype, with the gradient in memory of its own and over the logits, and this with Goldfish
loss; and torch's, of a whole copy of the logits in fp32. All take turns. Next to the time stands
the most memory that each holds at once beside the logits. A result that is wrong, compared with
float64, gets no time, and the exit status is 1. docs/benchmarks.md tells how to read them."""
EPILOG = """\
examples:
  axonn-ext bench loss
  axonn-ext bench loss --rows 4096 --vocab 128256 --dtype fp32 --threads 0 --json loss.json
"""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = benchmarks.add_parser(
        "loss", help="time and memory of cross-entropy, against torch's in fp32",
        description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--rows", type=whole(), default=1024, metavar="N", help="(default: %(default)s)")
    add("--vocab", type=whole(), nargs="+", default=list(VOCABULARIES), metavar="N",
        help="columns of the logits (default: 50304 128256)")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default="bf16",
        help="of the logits (default: %(default)s)")  # fmt: skip
    add("--device", choices=DEVICES, default=default_device(), help="(default: %(default)s)")
    add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
        help="threads; 0: one for each core (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole(), default=20, metavar="N",
        help="batches of calls of each way (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write machine and rows to a file")
    add("--plot", type=Path, metavar="FILE", help="draw the rows (.png, .svg or .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises UserError for a mistake of the user."""
    _check(args, extra)
    here, console = Process(), Console()
    used = process.set_threads(here, args.threads)
    rows: list[LossRow] = []
    with process.process_group(here, dist.HashStore(), args.device):
        grid = Grid()
        for vocab in dict.fromkeys(args.vocab):
            case = Case(args.rows, vocab, args.dtype, args.device)
            found = run_case(case, grid, rounds=args.rounds, on_round=dots(console, here))
            print_rows(console, found)
            rows += found
    say(console, LEGEND, style="dim")
    machine = describe_machine(threads=used, device=args.device)
    write_files(
        args, console, machine=machine, rows=rows,
        draw=lambda path: plot_rows(rows, path, subtitle=subtitle(machine, threads(used))),
    )  # fmt: skip
    return 0 if all(row.correct for row in rows) else 1


def _check(args: argparse.Namespace, extra: Sequence[str]) -> None:
    refuse_extra("bench loss", extra)
    if process.this_process() is not None:
        raise UserError("bench loss runs in one process; not under torchrun")
    check_device(args.device)
    check_outputs(args)
    width = DTYPES[args.dtype].itemsize
    for vocab in args.vocab:
        num_bytes = args.rows * vocab * (_OWN_COPIES * width + _FP32_COPIES * 4)
        problem = memory_problem(f"--rows {args.rows} --vocab {vocab}", num_bytes, args.device)
        if problem:
            raise UserError(problem)
