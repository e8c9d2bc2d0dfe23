"""`axonn-ext bench train`: starts the launches, and writes their results as a table and files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext.bench.output import check_outputs, dots, subtitle, write_files
from axonn_ext.bench.train import plot, report
from axonn_ext.bench.train.plan import (
    BASELINES,
    DTYPES,
    FIXED,
    FP32,
    OURS,
    SINGLE,
    STRONG,
    WEAK,
    Plan,
    SystemSpec,
    Workload,
)
from axonn_ext.bench.train.results import MemoryUse, Row, rows_from_values
from axonn_ext.bench.train.worker import PLAN_FILE, RESULT_FILE, leave, run_folder, run_here
from axonn_ext.calibrate.this_machine import describe_machine, num_cores
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import ZERO_STAGES
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.terminal.arguments import MOST_PROCESSES, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.train.memory import BYTES_OF_A_PARAMETER, memory_problem

DEFAULT_NPROC = 4

DESCRIPTION = """\
Trains the same GPT with torch's own ways and with ours on the same ranks, one thread each, and
compares tokens/s and peak memory. Every system must first compute the same losses as one process
does, or it gets no time. The systems take turns, so that noise meets all of them alike."""

EPILOG = """\
baselines:
  single  plain torch in one process with as many threads as this machine has cores
  ddp     DistributedDataParallel           fsdp2  fully_shard, block by block
  tp      DTensor tensor parallelism        tp-sp  with sequence parallelism

examples:
  axonn-ext bench train
  axonn-ext bench train --baseline ddp --baseline fsdp2 --grid 2x2x1 --grid 2x1x2
  axonn-ext bench train --strong --json strong.json --plot strong.png
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "train", help="training against torch's own ways", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--baseline", action="append", choices=BASELINES, metavar="NAME",
        help="may be given several times (default: all); single is always there",
    )  # fmt: skip
    parser.add_argument(
        "--grid", action="append", metavar="SHAPE",
        help="of ours; may be given several times (default: 2x2x1 for 4 ranks)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", type=whole(1, MOST_PROCESSES), metavar="N", help="ranks to start (default: 4)"
    )
    scaling = parser.add_mutually_exclusive_group()
    scaling.add_argument(
        "--strong", action="store_const", const=STRONG, dest="scaling", default=FIXED,
        help="the same batch on 1, 2, 4, ... up to N ranks",
    )  # fmt: skip
    scaling.add_argument(
        "--weak", action="store_const", const=WEAK, dest="scaling",
        help="the same batch for each of 1, 2, 4, ... up to N ranks; --batch is that of N",
    )  # fmt: skip
    for name, default, text in (
        ("hidden", 512, "features"), ("layers", 6, "blocks"), ("heads", 8, "attention heads"),
        ("sequence", 256, "tokens of a sequence"), ("batch", 16, "sequences of a global batch"),
        ("vocabulary", 512, "rows of the tied table"), ("rounds", 10, "turns of every system"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=whole(), default=default, metavar="N",
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default=FP32,
        help="of matrix products; bf16: each system's own mixed precision (default: %(default)s)",
    )  # fmt: skip
    _add_parallel_options(parser)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch
    parser.set_defaults(run=run)


def _add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of our system; --keep-weights holds for fsdp2, too."""
    group = parser.add_argument_group("how ours runs")
    group.add_argument("--layout", default="sharded", metavar="NAME", help="sharded or replicated")
    group.add_argument("--algorithm", default="auto", metavar="NAME", help="of the fused ops")
    group.add_argument("--heads-over-y", action="store_true", help="y splits heads in attention")
    group.add_argument(
        "--zero", action="append", type=int, choices=ZERO_STAGES, metavar="STAGE",
        help="0, 1 or 2: what data divides of gradients and AdamW's state; may be given several "
        "times (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--save-gathered", action="store_true", help="keep gathered inputs for backward"
    )
    group.add_argument(
        "--no-reshard-after-forward", action="store_true",
        help="keep gathered weights for backward; fsdp2 does so, too",
    )  # fmt: skip


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; returns 1 if a system does not train like the others."""
    refuse_extra("bench train", extra)
    here = process.this_process()
    console = Console()
    if args.worker is not None:
        here = here or Process()
        run_folder(args.worker, here, dots(console, here))
        leave(0)
    check_outputs(args)
    if here is None:
        rows = _launch_all(args, console)
    else:
        (plan,) = make_plans(args, here)
        rows = run_here(plan, here, dots(console, here))
    if here is None or here.rank == 0:
        _report(args, rows, console)
    status = report.exit_status(rows)
    if here is not None:
        leave(status)
    return status


def make_plans(args: argparse.Namespace, here: Process | None = None) -> list[Plan]:
    """Returns the launches that the arguments ask for, one for each number of ranks.

    Raises: UserError with all problems that were found.
    """
    most = _num_ranks(args, here)
    if args.scaling == WEAK and args.batch % most:
        raise UserError(f"--batch: {args.batch} must be divisible by --nproc {most} with --weak")
    baselines = [SystemSpec(kind) for kind in BASELINES if kind in (args.baseline or BASELINES)]
    if baselines[0].kind != SINGLE:
        baselines.insert(0, SystemSpec(SINGLE))
    counts = [most]
    if args.scaling != FIXED:
        counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    plans, problems = [], []
    for count in counts:
        ours = [
            SystemSpec(OURS, grid, zero)
            for grid in _grids(args, count, most)
            for zero in dict.fromkeys(args.zero or [0])
        ]
        batch = args.batch // most * count if args.scaling == WEAK else args.batch
        try:
            plan = Plan(
                Workload(_model(args), batch, dtype=args.dtype), _parallel(args),
                (*baselines, *ours), num_ranks=count, single_threads=num_cores(),
                rounds=args.rounds,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None
        plans.append(plan)
        # One process trains the whole model.
        num_bytes = plan.workload.model.num_parameters() * BYTES_OF_A_PARAMETER
        problem = memory_problem("the model", num_bytes, "cpu")
        problems += [problem] if problem else []
        problems += [f"{count} ranks, {problem}" for problem in plan.problems()]
    if problems:
        raise UserError(*problems)
    return plans


def _num_ranks(args: argparse.Namespace, here: Process | None) -> int:
    if here is not None:
        if args.nproc is not None:
            raise UserError("--nproc starts processes itself; leave it out under torchrun")
        if args.scaling != FIXED:
            raise UserError("--strong and --weak start processes themselves; not under torchrun")
        if here.local_world_size != here.world_size:
            raise UserError("bench train: all ranks must be on one host, whose clock they share")
        return here.world_size
    if args.nproc is not None:
        return int(args.nproc)
    grids = [parse_grid("--grid", text) for text in args.grid or ()]
    for grid in grids:
        check_processes(grid)
    return max((grid.size for grid in grids), default=DEFAULT_NPROC)


def _grids(args: argparse.Namespace, count: int, most: int) -> list[GridShape]:
    """Returns the given grids of `count` ranks, or else the default grid.

    Raises: UserError for a grid for which no launch has the right number of ranks.
    """
    asked = list(dict.fromkeys(parse_grid("--grid", text) for text in args.grid or ()))
    for grid in asked:
        fits = grid.size == most or (args.scaling != FIXED and _is_power_below(grid.size, most))
        if not fits:
            raise UserError(f"--grid: {grid} has {grid.size} ranks, but {most} are started")
    return [grid for grid in asked if grid.size == count] or [default_grid(count)]


def default_grid(count: int) -> GridShape:
    """Returns the grid that gives factors of two to x, y and z in turn, and the rest to data."""
    sizes = [1, 1, 1]
    for axis in range(3):
        if count % 2 == 0:
            sizes[axis], count = 2, count // 2
    x, y, z = sizes
    return GridShape(x=x, y=y, z=z, data=count)


def _is_power_below(size: int, most: int) -> bool:
    return size < most and size.bit_count() == 1


def _model(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, num_layers=args.layers,
        num_heads=args.heads, sequence_length=args.sequence,
    )  # fmt: skip


def _parallel(args: argparse.Namespace) -> ParallelConfig:
    return ParallelConfig(
        layout=args.layout, algorithm=args.algorithm, heads_over_y=args.heads_over_y,
        save_gathered=args.save_gathered, reshard_after_forward=not args.no_reshard_after_forward,
    )  # fmt: skip


# --- Launches ------------------------------------------------------------------------------------


def _launch_all(args: argparse.Namespace, console: Console) -> list[Row]:
    rows: list[Row] = []
    for plan in make_plans(args):
        text = f"timing {len(plan.systems)} systems, {plan.num_ranks} ranks"
        say(console, text, style="dim")
        timed = rows_from_values(_launch(plan))
        for i, (spec, row) in enumerate(zip(plan.systems, timed, strict=True)):
            if not args.no_memory and row.problem is None:
                timed[i] = dataclasses.replace(row, memory=_weigh(plan, spec, console))
        rows += timed
    return rows


def _weigh(plan: Plan, spec: SystemSpec, console: Console) -> MemoryUse:
    """Measures the peak memory of one system, which runs in its own processes."""
    say(console, f"memory of {spec.name}", style="dim")
    num_ranks = 1 if spec.kind == SINGLE else plan.num_ranks
    alone = dataclasses.replace(plan, what="memory", systems=(spec,), num_ranks=num_ranks)
    return MemoryUse(**_launch(alone))


def _launch(plan: Plan) -> Any:
    """Starts the processes of a plan, and returns their result."""
    # Imported here, since it takes a sixth of a second, which the started processes can save.
    from axonn_ext.launch.launcher import launch

    with tempfile.TemporaryDirectory(prefix="axonn_ext_bench_") as name:
        folder = Path(name)
        (folder / PLAN_FILE).write_text(plan.to_json())
        launch(plan.num_ranks, ["bench", "train", "--worker", name])
        return json.loads((folder / RESULT_FILE).read_text())


def _report(args: argparse.Namespace, rows: Sequence[Row], console: Console) -> None:
    """Prints the table, and writes the files that were asked for."""
    machine = describe_machine(threads=1)
    report.print_rows(console, rows, cores=num_cores())
    title = subtitle(machine, "one thread a rank", args.dtype)
    write_files(
        args, console, machine=machine, rows=rows,
        draw=lambda path: plot.plot_rows(
            rows, path, scaling=args.scaling, cores=num_cores(), subtitle=title
        ),
    )  # fmt: skip
