"""The options of `axonn-ext bench train`, and their defaults on each device."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axonn_ext.bench.benchmark import add_device, add_run_options, new_parser
from axonn_ext.bench.train.plan import BASELINES, BF16, DTYPES, FIXED, FP32, STRONG, WEAK
from axonn_ext.calibrate.this_machine import default_device
from axonn_ext.spec.optimizer import ZERO_STAGES
from axonn_ext.terminal.arguments import MOST_PROCESSES, whole

DESCRIPTION = """\
Trains the same GPT with torch's own ways and with ours on the same ranks, and compares tokens/s and
peak memory: on GPUs, one for each rank, or on CPUs, where a rank has one thread. Every system must
first compute the same losses as one process does, or it gets no time. The systems take turns, so
that noise affects all of them equally."""

EPILOG = """\
baselines:
  single  plain torch in one process with as many threads as this machine has cores
  ddp     DistributedDataParallel           fsdp2  fully_shard, block by block
  tp      DTensor tensor parallelism        tp-sp  with sequence parallelism

examples:
  axonn-ext bench train
  axonn-ext bench train --baseline ddp --baseline fsdp2 --grid 2x2x1 --grid 2x1x2
  axonn-ext bench train --strong --json strong.json --plot strong.png
  axonn-ext bench train --device cuda --nproc 1 --baseline ddp --baseline fsdp2
"""
# Sizes that a step of each device is made of, by option.
SIZES = {
    "cpu": {"hidden": 512, "layers": 6, "heads": 8, "sequence": 256, "batch": 16,
            "vocabulary": 512},
    "cuda": {"hidden": 1024, "layers": 24, "heads": 16, "sequence": 1024, "batch": 8,
             "vocabulary": 50304},
}  # fmt: skip
DEFAULT_DTYPES = {"cpu": FP32, "cuda": BF16}


def add_parser(
    commands: argparse._SubParsersAction[Any], run: Callable[[argparse.Namespace], int]
) -> None:
    """Adds the subcommand, which calls `run`."""
    parser = new_parser(
        commands, "train", summary="training against torch's own ways", description=DESCRIPTION,
        epilog=EPILOG, run=run,
    )  # fmt: skip
    add = parser.add_argument
    add("--baseline", action="append", choices=BASELINES, metavar="NAME",
        help="may be given several times (default: all); single is always there")  # fmt: skip
    add("--grid", action="append", metavar="SHAPE",
        help="of ours; may be given several times (default: 2x2x1 for 4 ranks)")  # fmt: skip
    add_device(parser)
    add("--nproc", type=whole(1, MOST_PROCESSES), metavar="N",
        help="ranks to start (default: one for each GPU; on CPUs 4)")  # fmt: skip
    scaling = parser.add_mutually_exclusive_group().add_argument
    scaling("--strong", action="store_const", const=STRONG, dest="scaling", default=FIXED,
            help="the same batch on 1, 2, 4, ... up to N ranks")  # fmt: skip
    scaling("--weak", action="store_const", const=WEAK, dest="scaling",
            help="the same batch for each of 1, 2, 4, ... up to N ranks; --batch is that of "
            "N")  # fmt: skip
    for name, text in (
        ("hidden", "features"), ("layers", "blocks"), ("heads", "attention heads"),
        ("sequence", "tokens of a sequence"), ("batch", "sequences of a global batch"),
        ("vocabulary", "rows of the tied table"),
    ):  # fmt: skip
        defaults = f"(default: {SIZES['cpu'][name]}; on GPUs {SIZES['cuda'][name]})"
        add(f"--{name}", type=whole(), metavar="N", help=f"{text} {defaults}")
    add("--dtype", choices=DTYPES,
        help="of matrix products; bf16: each system's own mixed precision (default: fp32; on GPUs "
        "bf16)")  # fmt: skip
    _add_parallel_options(parser)
    add("--no-memory", action="store_true", help="leave peak memory out")
    add_run_options(parser, rounds=10)
    add("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch


def _add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of our system; --no-reshard-after-forward also applies to fsdp2."""
    add = parser.add_argument_group("how ours runs").add_argument
    add("--layout", default="sharded", metavar="NAME", help="sharded or replicated")
    add("--algorithm", default="auto", metavar="NAME", help="of the fused ops")
    add("--heads-over-y", action="store_true", help="y splits heads in attention")
    add("--zero", action="append", type=int, choices=ZERO_STAGES, metavar="STAGE",
        help="0, 1 or 2: what data divides of gradients and AdamW's state; may be given several "
        "times (default: 0)")  # fmt: skip
    add("--save-gathered", action="store_true", help="keep gathered inputs for backward")
    add("--no-reshard-after-forward", action="store_true",
        help="keep gathered weights for backward; fsdp2 does so, too")  # fmt: skip


def fill_in(args: argparse.Namespace) -> None:
    """Sets the options that were not given to their defaults, which depend on the device."""
    args.device = args.device or default_device()
    for name, size in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.dtype = args.dtype or DEFAULT_DTYPES[args.device]
