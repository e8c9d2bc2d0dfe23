"""The options of `axonn-ext bench train`, and their defaults on each device."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axonn_ext.bench.benchmark import add_device, add_run_options
from axonn_ext.bench.train.plan import BASELINES, BF16, DTYPES, FIXED, FP32, STRONG, WEAK
from axonn_ext.calibrate.this_machine import default_device
from axonn_ext.spec.optimizer import ZERO_STAGES
from axonn_ext.spec.parallel import ALGORITHMS
from axonn_ext.terminal.arguments import MOST_PROCESSES, new_parser, whole

DESCRIPTION = """\
Trains the same GPT with torch's parallelisms and with axonn_ext on the same ranks, and compares
tokens/s and peak memory: on GPUs, one per rank, or on CPUs, with one thread per rank. Every system
must first compute the same losses as one process, or it gets no time. The systems take turns, so
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
# The sizes of a step on each device, by option.
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
        commands, "train", run, help="training against torch's DDP, FSDP2 and DTensor",
        description=DESCRIPTION, epilog=EPILOG,
    )  # fmt: skip
    add = parser.add_argument
    add("--baseline", action="append", choices=BASELINES, metavar="NAME",
        help="system to compare with, in addition to single; may be given several times (default: "
        "all)")  # fmt: skip
    add("--grid", action="append", metavar="SHAPE",
        help="grid of axonn_ext; may be given several times (default: factors of 2 to x, y and z "
        "in turn, the rest to data)")  # fmt: skip
    add_device(parser)
    add("--nproc", type=whole(1, MOST_PROCESSES), metavar="N",
        help="number of ranks to start (default: the largest --grid, else one per GPU, on CPUs "
        "4)")  # fmt: skip
    scaling = parser.add_mutually_exclusive_group().add_argument
    scaling("--strong", action="store_const", const=STRONG, dest="scaling", default=FIXED,
            help="measure strong scaling: the same batch on 1, 2, 4, ... up to N "
            "ranks")  # fmt: skip
    scaling("--weak", action="store_const", const=WEAK, dest="scaling",
            help="measure weak scaling: the same batch per rank on 1, 2, 4, ... up to N ranks; "
            "--batch is that of all N together")  # fmt: skip
    for name, text in (
        ("hidden", "hidden size"), ("layers", "number of blocks"),
        ("heads", "number of attention heads"), ("sequence", "tokens per sequence"),
        ("batch", "sequences per global batch"), ("vocabulary", "tokens in the vocabulary"),
    ):  # fmt: skip
        defaults = f"(default: {SIZES['cpu'][name]}; on GPUs {SIZES['cuda'][name]})"
        add(f"--{name}", type=whole(), metavar="N", help=f"{text} {defaults}")
    add("--dtype", choices=DTYPES,
        help="dtype of matrix products; bf16: each system's own mixed precision (default: fp32; on "
        "GPUs bf16)")  # fmt: skip
    _add_parallel_options(parser)
    add("--no-memory", action="store_true",
        help="skip the extra runs that measure peak memory on CPUs")  # fmt: skip
    add_run_options(parser, rounds=10)
    add("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch


def _add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of our system; --no-reshard-after-forward also applies to fsdp2."""
    add = parser.add_argument_group("options of axonn_ext").add_argument
    add("--layout", default="sharded", metavar="NAME",
        help="layout of activations: sharded or replicated (default: %(default)s)")  # fmt: skip
    add("--algorithm", default="auto", metavar="NAME",
        help=f"algorithm of the fused ops: {', '.join(ALGORITHMS)} (default: "
        "%(default)s)")  # fmt: skip
    add("--heads-over-y", action="store_true",
        help="split attention heads over y instead of sequences")  # fmt: skip
    add("--zero", action="append", type=int, choices=ZERO_STAGES, metavar="STAGE",
        help="ZeRO stage; 1 shards AdamW's state over the data axis, 2 also gradients; may be "
        "given several times (default: 0)")  # fmt: skip
    add("--save-gathered", action="store_true",
        help="keep gathered inputs for backward; takes more memory")  # fmt: skip
    add("--no-reshard-after-forward", action="store_true",
        help="keep gathered weights for backward; also applies to fsdp2")  # fmt: skip


def fill_in(args: argparse.Namespace) -> None:
    """Sets the options that were not given to their defaults, which depend on the device."""
    args.device = args.device or default_device()
    for name, size in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.dtype = args.dtype or DEFAULT_DTYPES[args.device]
