"""`axonn-ext bench optimizer`."""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axonn_ext.bench.optimizer.plot import plot_rows
from axonn_ext.bench.optimizer.report import LEGEND, print_rows
from axonn_ext.bench.optimizer.run import run_case
from axonn_ext.bench.optimizer.systems import Case
from axonn_ext.bench.output import check_outputs, dots, subtitle, threads, write_files
from axonn_ext.calibrate.measure import ROUNDS
from axonn_ext.calibrate.this_machine import (
    DTYPES,
    check_device,
    default_device,
    describe_machine,
)
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.spec.optimizer import BUCKET_ELEMENTS
from axonn_ext.terminal.arguments import MOST_THREADS, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.train.memory import memory_problem

DEVICES = ("cpu", "cuda")
OF_WEIGHTS = ("bf16", "fp16", "fp32")
ELEMENTS = 64_000_000
# Bytes of an element, without weights and the gradients that are shared. On the device: masters,
# gradients and moments of `torch`, state and wide gradients of `device`, and a pass. On the host:
# state of `cpu`, and a pass.
_ON_DEVICE, _ON_HOST = 16 + 16 + 4, 12 + 4
_ON_DISK = 12  # masters and moments in fp32
DESCRIPTION = """\
Times a step of AdamW on one rank, with its state on the device, in host memory and on the disk
(docs/memory.md), in turns with torch's fused AdamW over fp32 weights with fp32 gradients. Before,
all must give the same bits; one that does not gets no time, and the exit status is 1.
docs/benchmarks.md tells how to read the numbers."""
EPILOG = """\
examples:
  axonn-ext bench optimizer
  axonn-ext bench optimizer --elements 16e6 --dtype fp32 --threads 0 --json optimizer.json
"""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = benchmarks.add_parser(
        "optimizer", help="a step of AdamW with its state on the device, the host and the disk",
        description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--elements", type=whole(), default=ELEMENTS, metavar="N",
        help="of all weights, in a few matrices and vectors (default: %(default)s)")  # fmt: skip
    add("--dtype", choices=OF_WEIGHTS, default="bf16", help="of weights (default: %(default)s)")
    add("--device", choices=DEVICES, default=default_device(), help="(default: %(default)s)")
    add("--bucket", type=whole(), default=BUCKET_ELEMENTS, metavar="N",
        help="elements that cross to the host together (default: %(default)s)")  # fmt: skip
    add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
        help="threads; 0: one for each core (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole(), default=ROUNDS, metavar="N",
        help="batches of steps of each system (default: %(default)s)")  # fmt: skip
    add("--folder", type=Path, metavar="DIR",
        help="for the state on the disk (default: the system's for temporary files)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write machine and rows to a file")
    add("--plot", type=Path, metavar="FILE", help="draw the rows (.png, .svg or .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises UserError for a mistake of the user."""
    refuse_extra("bench optimizer", extra)
    folder = Path(tempfile.gettempdir()) if args.folder is None else args.folder
    _check(args, folder)
    here, console = Process(), Console()
    used = process.set_threads(here, args.threads)
    case = Case(args.elements, args.dtype, args.device, args.bucket, folder)
    with process.process_group(here, dist.HashStore(), args.device):
        try:
            rows = run_case(case, rounds=args.rounds, on_round=dots(console, here))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES):
                raise
            raise UserError(f"--folder: no state fits {folder}: {error.strerror}") from None
    print_rows(console, rows)
    say(console, LEGEND, style="dim")
    machine = describe_machine(threads=used, device=args.device)
    write_files(
        args, console, machine=machine, rows=rows,
        draw=lambda path: plot_rows(rows, path, subtitle=subtitle(machine, threads(used))),
    )  # fmt: skip
    return 0 if all(row.correct for row in rows) else 1


def _check(args: argparse.Namespace, folder: Path) -> None:
    if process.this_process() is not None:
        raise UserError("bench optimizer runs in one process; not under torchrun")
    check_device(args.device)
    check_outputs(args)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--folder: expected a folder that can be written, got {folder}")
    width = DTYPES[args.dtype].itemsize
    on_device = _ON_DEVICE + 4 * width  # of three systems, and gradients
    if args.device == "cpu":
        needs = {"cpu": on_device + _ON_HOST}
    else:
        needs = {args.device: on_device, "cpu": _ON_HOST}
    for device, num_bytes in needs.items():
        problem = memory_problem(f"--elements {args.elements}", args.elements * num_bytes, device)
        if problem:
            raise UserError(problem)
    there = os.statvfs(folder)
    free, need = there.f_bavail * there.f_frsize, args.elements * _ON_DISK
    if need > free:
        raise UserError(
            f"--folder: --elements {args.elements} needs {need / 1e9:,.1f} GB, {folder} has "
            f"{free / 1e9:,.1f} GB left"
        )
