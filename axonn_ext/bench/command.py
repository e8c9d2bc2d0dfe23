"""`axonn-ext bench ag-gemm|gemm-rs|gemm-ar|gemm-ops|linear|block`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from axonn_ext import ops
from axonn_ext.bench import symm_mem
from axonn_ext.bench.benchmark import add_device, add_run_options
from axonn_ext.bench.case import Spec
from axonn_ext.bench.output import check_outputs, subtitle, write_plot
from axonn_ext.bench.report import plot_rows, print_group, print_legend
from axonn_ext.bench.results import Row, compare, content_of, read_rows
from axonn_ext.bench.run import Plan, run_worker
from axonn_ext.calibrate.shapes import (
    ALL_GEMM_OPS,
    DEFAULTS,
    GEMM_OPS,
    OPS,
    PUBLISHED_LAYERS,
    PUBLISHED_ROWS,
    Shape,
    describe,
    parse_shapes,
    problems,
)
from axonn_ext.calibrate.this_machine import (
    DTYPES,
    check_device,
    default_device,
    describe_machine,
    num_cores,
)
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.parallel import LAYOUTS, ROLES
from axonn_ext.terminal.arguments import MOST_PROCESSES, MOST_THREADS, new_parser, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.terminal.memory import memory_problem
from axonn_ext.terminal.rows import RowsFile, is_replaceable

DEFAULT_WORLD = 2
# This is the order of the table, with the baseline first.
ALGORITHMS = ops.ALGORITHMS[::-1]
# These run on GPUs by default. "fused" only supports some GPUs.
CUDA_ALGORITHMS = tuple(name for name in ALGORITHMS if name != "fused")
BASELINES = (symm_mem.NAME,)

SUMMARIES = {
    "ag-gemm": "all_gather_matmul: gathers A's rows, multiplies by this rank's columns of B",
    "gemm-rs": "matmul_reduce_scatter: multiplies, sums over the ranks, scatters the rows",
    "gemm-ar": "matmul_all_reduce: multiplies, sums over the ranks, on every rank",
    ALL_GEMM_OPS: "ag-gemm, gemm-rs and gemm-ar, one after another",
    "linear": "nn.Linear on a grid, forward and backward",
    "block": "a GPT-2 transformer block on a grid, forward and backward",
}
DESCRIPTION = """\
Times {summary}.

Compute alone (the floor), the collectives alone and the algorithms run interleaved, and the slowest
rank's times count. Results are compared with float64 before and after timing; a wrong one gets no
time, and the exit status is 1. The last lines compare auto with sequential over all shapes.
docs/benchmarks.md explains the numbers."""
GEMM_EXAMPLES = """\
examples:
  axonn-ext bench {op}                                      2 ranks, {default}
  axonn-ext bench {op} --world 4 --shapes 256,256,256 1024,1024,1024
  axonn-ext bench {op} --world 8 --dtype bf16 --shapes llama-70b --json {op}.json
  axonn-ext bench {op} --world 8 --dtype bf16 --shapes published:64,4096 \\
      --algorithms sequential,chunked,fused,auto --baseline torch-symm-mem
  torchrun --nproc-per-node 4 -m axonn_ext bench {op} --algorithms sequential,fused

presets:
  llama-70b, gpt3   layers of Llama 2 70B (4096 tokens) and GPT-3 175B (2048 tokens)
  published         {layers} MLPs of models from 7B to 405B, each with
                    M = {rows};
                    published:64,1024 has only these M. The largest needs about 10 GB per GPU in
                    bf16 on 2 ranks, and 2 GB of host memory per rank; all take about ten minutes
                    per op on GPUs, and hours on a CPU
"""
GRID_EXAMPLES = """\
examples:
  axonn-ext bench {op}                                       x=2, {default}
  axonn-ext bench {op} --grid 2x1x1 --grid 2x2x1 --grid x=2,y=2,z=2 --plot {op}.png
  axonn-ext bench {op} --grid 2x2x1 --layout replicated --rounds 100
  torchrun --nproc-per-node 4 -m axonn_ext bench {op} --grid 2x2x1 --algorithms sequential,fused
"""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds a subcommand for each op."""
    for op in (*OPS, ALL_GEMM_OPS):
        examples = GRID_EXAMPLES if op in ("linear", "block") else GEMM_EXAMPLES
        parser = new_parser(
            benchmarks, op, run, help=SUMMARIES[op],
            description=DESCRIPTION.format(summary=SUMMARIES[op]),
            epilog=examples.format(
                op=op, default=describe(DEFAULTS[op]), layers=len(PUBLISHED_LAYERS),
                rows=", ".join(map(str, PUBLISHED_ROWS)),
            ),
        )  # fmt: skip
        _add_options(parser, op)
        parser.set_defaults(op=op)


def _add_options(parser: argparse.ArgumentParser, op: str) -> None:
    add = parser.add_argument
    add("--grid", action="append", default=[], metavar="SHAPE",
        help="grid of ranks: x=2,y=2,z=1 (axes left out have size 1) or 2x2x1; may be given "
        "several times")  # fmt: skip
    add("--world", type=whole(1, MOST_PROCESSES), metavar="N",
        help=f"number of ranks, short for --grid x=N (default: {DEFAULT_WORLD})")  # fmt: skip
    sizes = ",".join(DEFAULTS[op]._fields)
    add("--shapes", nargs="+", default=[], metavar="SHAPE",
        help=f'global sizes as "{sizes}", or a preset: '
        + ("gpt2, gpt3" if op == "block" else "llama-70b, gpt3, published, published:M,M,...")
        + f" (default: {','.join(map(str, DEFAULTS[op]))})")  # fmt: skip
    add_device(parser, "; ranks that outnumber the GPUs share them")
    add("--algorithms", metavar="A,B,...",
        help=f"algorithms to time (default: {','.join(ALGORITHMS)}; on cuda without "
        "fused)")  # fmt: skip
    if op in (*GEMM_OPS, ALL_GEMM_OPS):
        add("--baseline", action="append", choices=BASELINES, default=[],
            help="torch.ops.symm_mem's fused ops, timed in turns with ours; needs a GPU per rank "
            "(default: none)")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default="fp32",
        help="dtype of inputs and results (default: %(default)s)")  # fmt: skip
    add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
        help="CPU threads per rank; 0: its share of the cores (default: 1, so that a rank's "
        "arithmetic is the same on every machine and grid)")  # fmt: skip
    if op == "linear":
        add("--role", choices=tuple(ROLES), default="expand",
            help="role of the Linear; expand: x splits its output features and y its input "
            "features, contract: the reverse (default: %(default)s)")  # fmt: skip
    if op in ("linear", "block"):
        add("--layout", choices=LAYOUTS, default="sharded",
            help="layout of the activations (default: %(default)s)")  # fmt: skip
    add_run_options(parser, json=", updated after each shape")
    # File in which the processes that this command starts leave the rows of all grids so far.
    add("--rows", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    here = process.this_process()
    args.device = args.device or default_device()
    plan = make_plan(args, here)
    if here is None or here.rank == 0:
        check_outputs(args)
    if here is None:
        return _launch(args, plan)
    cases = _Cases(args)
    rows = run_worker(plan, here, on_case=cases.add)
    if here.rank == 0 and args.rows is None:
        _report(args, rows)
    return 0 if args.rows is not None else _status(rows)


class _Cases:
    """Shows and writes the rows of each case, a grid and a shape, as soon as they are known.

    A --json that cannot be replaced, such as a pipe, is left to `_report`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        is_written = args.json is not None and is_replaceable(args.json)
        self._files = (
            RowsFile("--json", args.json if is_written else None), RowsFile("--rows", args.rows)
        )  # fmt: skip
        self._console = Console()
        has_earlier = args.rows is not None and args.rows.exists()  # of previous grids
        self._rows = read_rows(args.rows) if has_earlier else []

    def add(self, case: Sequence[Row]) -> None:
        self._rows += case
        of_gpus = self._args.device == "cuda"
        counts = {"gpus": torch.cuda.device_count()} if of_gpus else {"cores": num_cores()}
        print_group(self._console, case, **counts)
        machine = describe_machine(threads=case[0].threads, device=self._args.device)
        for file in self._files:
            file.write(content_of(machine, self._rows, compare(self._rows)))


def make_plan(args: argparse.Namespace, here: Process | None) -> Plan:
    """Returns the plan of the arguments.

    Raises: UserError with all problems that were found.
    """
    grids = _grids(args, here)
    check_device(args.device)
    default = CUDA_ALGORITHMS if args.device == "cuda" else ALGORITHMS
    algorithms = tuple(dict.fromkeys(args.algorithms.split(","))) if args.algorithms else default
    for name in algorithms:
        if name not in ALGORITHMS:
            raise UserError(f"--algorithms: expected some of {', '.join(ALGORITHMS)}, got {name!r}")
    options = {key: getattr(args, key) for key in ("role", "layout") if key in args}
    role, layout = options.get("role", "expand"), options.get("layout", "sharded")
    baselines = tuple(dict.fromkeys(getattr(args, "baseline", ())))
    asked = [
        (op, shape, grid)
        for op in (GEMM_OPS if args.op == ALL_GEMM_OPS else (args.op,))
        for grid in grids
        for shape in parse_shapes(op, args.shapes, role=role)
    ]
    found = [
        problem
        for op, shape, grid in asked
        for problem in problems(op, shape, grid, role=role, layout=layout)
    ]
    if baselines:
        found += _baseline_problems(asked, dtype=args.dtype, device=args.device)
    found = found or _memory_problems(asked, dtype=args.dtype, device=args.device)
    if found:
        raise UserError(*found)
    specs = tuple(
        Spec(op, shape, grid, args.dtype, (*algorithms, *baselines), options, args.device)
        for op, shape, grid in asked
    )
    return Plan(specs, threads=args.threads, rounds=args.rounds)


def _baseline_problems(
    asked: Sequence[tuple[str, Shape, GridShape]], *, dtype: str, device: str
) -> list[str]:
    """Returns why torch-symm-mem cannot run, each reason once."""
    reasons = (symm_mem.why_refused(op, grid, dtype=dtype, device=device) for op, _, grid in asked)
    return [f"--baseline {symm_mem.NAME}: {reason}" for reason in dict.fromkeys(reasons) if reason]


def _memory_problems(
    asked: Sequence[tuple[str, Shape, GridShape]], *, dtype: str, device: str
) -> list[str]:
    """Returns which shapes need more memory than this host has for all ranks."""
    width = DTYPES[dtype].itemsize
    problems = (
        memory_problem(f"{op} {describe(shape)}", shape.num_elements * width, device)
        for op, shape, _ in asked
    )
    return [problem for problem in dict.fromkeys(problems) if problem]


def _grids(args: argparse.Namespace, here: Process | None) -> tuple[GridShape, ...]:
    if args.grid and args.world is not None:
        raise UserError("--world N is --grid x=N: give one of them")
    default = DEFAULT_WORLD if here is None else here.world_size
    texts = args.grid or [f"x={default if args.world is None else args.world}"]
    grids = tuple(dict.fromkeys(parse_grid("--grid", text) for text in texts))
    if here is None:
        for grid in grids:
            check_processes(grid)
    else:
        if here.local_world_size != here.world_size:
            raise UserError("bench: all ranks must be on one host, whose clock they share")
        for grid in grids:
            if grid.size != here.world_size:
                raise UserError(
                    f"--grid: {grid} has {grid.size} ranks, but torchrun started {here.world_size}"
                )
    return grids


def _launch(args: argparse.Namespace, plan: Plan) -> int:
    """Starts the processes of one grid after another, and shows the results of all."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="axonn_ext_bench_") as folder:
        path = Path(folder) / "rows.json"  # of all grids so far
        try:
            for grid in plan.grids:
                launch(grid.size, [*_worker_arguments(args, grid), "--rows", str(path)])
        finally:
            if path.exists():  # if a grid failed, earlier measurements are still reported
                rows = read_rows(path)
                _report(args, rows)
    return _status(rows)


def _worker_arguments(args: argparse.Namespace, grid: GridShape) -> list[str]:
    """Returns the arguments of a worker: those of this process, with only one grid."""
    arguments = ["bench", args.op, "--grid", str(grid)]
    for key in ("device", "algorithms", "dtype", "threads", "rounds", "role", "layout"):
        if getattr(args, key, None) is not None:
            arguments += [f"--{key}", str(getattr(args, key))]
    if args.json is not None:
        arguments += ["--json", str(args.json)]
    for name in getattr(args, "baseline", ()):
        arguments += ["--baseline", name]
    return arguments + (["--shapes", *args.shapes] if args.shapes else [])


def _report(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Prints the text below the tables, and writes the requested files."""
    console = Console()
    machine = describe_machine(threads=rows[0].threads, device=args.device)
    print_legend(console, rows)
    summary = compare(rows)
    for line in summary:
        say(console, line.sentence())
    title = subtitle(machine, f"{machine['threads_per_rank']} threads a rank")
    if args.json is not None and not is_replaceable(args.json):  # else it is already written
        with RowsFile("--json", args.json) as file:
            file.write(content_of(machine, rows, summary))
    write_plot(args, console, draw=partial(plot_rows, rows, title))


def _status(rows: Sequence[Row]) -> int:
    return 0 if all(row.correct for row in rows) else 1
