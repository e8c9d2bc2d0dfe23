"""`axonn-ext bench`: times the ops, the modules, the loss, the optimizer, training, pipelines."""

from __future__ import annotations

import argparse
from typing import Any

from axonn_ext.bench import command, fused_gemm, link_overlap, ranking
from axonn_ext.bench.loss import LOSS
from axonn_ext.bench.ops import OPS
from axonn_ext.bench.optimizer import OPTIMIZER
from axonn_ext.bench.pipeline import command as pipeline
from axonn_ext.bench.train import command as train
from axonn_ext.calibrate import command as links

DESCRIPTION = """\
Times the fused ops against compute alone, the collectives alone and the unfused pair; training,
the loss and the optimizer against torch's; and the schedules of pipelines. Starts its own
processes, or runs in those of torchrun. Run `axonn-ext bench BENCHMARK --help` for the options of a
benchmark."""

EPILOG = """\
examples:
  axonn-ext bench ag-gemm --world 4
  axonn-ext bench gemm-ops --world 8 --dtype bf16 --shapes published --baseline torch-symm-mem
  axonn-ext bench linear --grid 2x2x1 --grid 2x2x2 --json linear.json --plot linear.png
  axonn-ext bench train --nproc 4 --grid 2x2x1 --baseline ddp --baseline tp
  axonn-ext bench loss --threads 0
  axonn-ext bench ops --json ops.json
  axonn-ext bench pipeline --json pipeline.json --plot pipeline.png
  axonn-ext bench optimizer --threads 0
"""

# Each has add_parser(benchmarks), which adds its subcommands and their `run`.
BENCHMARKS = (
    command, fused_gemm, link_overlap, links, LOSS, OPS, OPTIMIZER, pipeline, ranking, train
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand and, below it, every benchmark."""
    parser = commands.add_parser(
        "bench", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for benchmark in BENCHMARKS:
        benchmark.add_parser(benchmarks)
