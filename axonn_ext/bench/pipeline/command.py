"""`axonn-ext bench pipeline`: starts the launch, and writes its results as a table and files."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from axonn_ext.bench import launched
from axonn_ext.bench.benchmark import add_run_options
from axonn_ext.bench.output import check_outputs, dots, exit_status, subtitle, write_plot
from axonn_ext.bench.pipeline.plan import BASE, CASES, ROWS, CaseSpec, Plan, problem_of
from axonn_ext.bench.pipeline.report import plot_rows, print_rows
from axonn_ext.bench.pipeline.results import Row, lines_of
from axonn_ext.bench.results import content_of
from axonn_ext.calibrate.this_machine import describe_machine
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.arguments import new_parser, number, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.terminal.rows import RowsFile

DESCRIPTION = """\
Times a step of a pipeline with each of our schedules and of torch.distributed.pipelining's, in
turns, with and without random delays of messages.

The stages are emulated: a layer multiplies a small matrix and then sleeps until the time of
--stage-ms is over, so all stages run at the same time even on few cores. Messages, threads, orders
and decisions are real, and every schedule must first compute the same gradients as one process, or
it gets no time. The result is what the schedules cost and gain, not the speed of a model.

Every message arrives late by a random time, exponentially distributed. --delay is its mean, as a
share of a micro-batch's time on a stage; in a round, all schedules get the same random numbers.
Torch's messages cannot be delayed, so torch is timed without delays only."""

EPILOG = """\
schedules (--case):
  1f1b, gpipe, zero_bubble     a fixed order; zero_bubble computes weight gradients later
  interleaved                  1f1b with two chunks on each rank
  message_driven               whatever has arrived, with up to twice 1f1b's micro-batches in
                               flight, and weight gradients when no message has arrived
  message_driven-c10d          the same, with all messages over c10d, as between hosts
  message_driven-4             message_driven, with the weight gradients of at most 4 micro-batches
                               waiting
  message_driven-1-4           the same, with as many in flight as 1f1b
  message_driven-whole         message_driven, with weight gradients in backward
  message_driven-1-whole       the same, with as many in flight as 1f1b
  torch-1f1b                   Schedule1F1B
  torch-zero_bubble            ScheduleInterleavedZeroBubble, with one stage on each rank

examples:
  axonn-ext bench pipeline
  axonn-ext bench pipeline --stage-ms 30 --delay 0 0.1 0.2 --json pipeline.json --plot pipeline.png
  axonn-ext bench pipeline --grid pipe=4,x=2      with two ranks on a stage, which must agree
  axonn-ext bench pipeline --stage-ms 10,20,10 --case 1f1b zero_bubble message_driven
"""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        benchmarks, "pipeline", run, help="pipeline schedules on emulated stages, ours and torch's",
        description=DESCRIPTION, epilog=EPILOG,
    )  # fmt: skip
    add = parser.add_argument
    add("--grid", default="pipe=4", metavar="SHAPE",
        help="grid of ranks, with at least 2 stages along pipe (default: %(default)s)")  # fmt: skip
    add("--micro-batches", type=whole(), default=16, metavar="N",
        help="number of micro-batches per step (default: %(default)s)")  # fmt: skip
    add("--stage-ms", default="20", metavar="F,B,W",
        help="milliseconds per micro-batch on a stage, for forward, input gradient and weight "
        "gradients, or one number that holds for each of them (default: %(default)s)")  # fmt: skip
    add("--delay", type=number(least=0, most=100), nargs="+", default=[0.0, 0.2], metavar="SHARE",
        help="mean delays of messages, as shares of a micro-batch's time on a stage (default: 0 "
        "0.2)")  # fmt: skip
    add("--case", nargs="+", choices=tuple(CASES), metavar="NAME",
        help="schedules to time, in addition to 1f1b (default: all that can run)")  # fmt: skip
    add("--seed", type=whole(0), default=0, metavar="N",
        help="random seed for the delays (default: %(default)s)")  # fmt: skip
    add_run_options(parser, rounds=10)
    add("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if a schedule has wrong gradients."""
    here = process.this_process()
    console = Console()
    if args.worker is not None:
        here = here or Process()
        launched.do_plan(args.worker, here, Plan, partial(_run_here, here, console))
        return 0
    check_outputs(args)
    plan = make_plan(args)
    if here is None:
        say(console, f"timing {len(plan.cases)} schedules on {plan.grid.size} ranks", style="dim")
        rows = launched.from_plain(list[Row], launched.start("pipeline", plan, plan.grid.size))
    else:
        if here.world_size != plan.grid.size or here.local_world_size != here.world_size:
            raise UserError(
                f"--grid: {plan.grid} needs {plan.grid.size} ranks on one host, but torchrun has "
                f"started {here.world_size}"
            )
        rows = _run_here(here, console, plan)
    if here is None or here.rank == 0:
        machine = describe_machine(threads=1)
        print_rows(console, rows)
        with RowsFile("--json", args.json) as file:
            file.write(content_of(machine, rows, lines_of(rows)))
        write_plot(args, console, draw=partial(plot_rows, rows, subtitle(machine)))
    return exit_status(rows)


def _run_here(here: Process, console: Console, plan: Plan) -> list[Row]:
    """Times the cases of a plan in the processes that exist already."""
    # Imported here, since timing needs torch's distributed part, which takes a second to load.
    from axonn_ext.bench.pipeline.run import time_cases

    with launched.meeting("pipeline", plan, here, "cpu"):
        return time_cases(plan, dots(console, here))


def make_plan(args: argparse.Namespace) -> Plan:
    """Returns the plan of the arguments. Raises UserError with all problems that were found."""
    grid = parse_grid("--grid", args.grid, pipe=True)
    check_processes(grid)
    if grid.pipe < 2:
        raise UserError(f"--grid: expected at least 2 stages along pipe, got {grid}")
    for axis, size in (("x", grid.x), ("y", grid.y)):
        if ROWS % (size * grid.z):  # there are twice as many features
            raise UserError(f"--grid: {axis} and z together must divide {ROWS}, got {grid}")
    return Plan(
        cases=_cases(args, grid), grid=grid, micro_batches=args.micro_batches,
        stage_ms=parse_times("--stage-ms", args.stage_ms),
        delays=tuple(dict.fromkeys(args.delay)), rounds=args.rounds, seed=args.seed,
    )  # fmt: skip


def _cases(args: argparse.Namespace, grid: GridShape) -> tuple[CaseSpec, ...]:
    """Returns the requested cases, or those that can run; always with 1f1b."""
    asked = set(args.case or CASES) | {BASE}
    found = {name: problem_of(CASES[name], grid, args.micro_batches) for name in CASES}
    problems = [f"--case {name}: {found[name]}" for name in args.case or () if found[name]]
    if problems:
        raise UserError(*problems)
    return tuple(CASES[name] for name in CASES if name in asked and found[name] is None)


def parse_times(option: str, text: str) -> tuple[float, float, float]:
    """Returns the milliseconds of forward, input gradient and weight gradients."""
    parts = text.split(",")
    try:
        values = [number(least=0, most=60_000)(part) for part in parts]
    except argparse.ArgumentTypeError:
        values = []
    if len(values) not in (1, 3) or not sum(values):
        raise UserError(
            f"{option}: expected milliseconds F,B,W, or one number, from 0 to 60000 and not all 0, "
            f"got {text!r}"
        )
    forward, backward, weight = values * 3 if len(values) == 1 else values
    return forward, backward, weight
