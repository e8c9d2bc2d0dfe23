"""`axonn-ext bench train`: starts the launches, and writes their results as a table and files."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from axonn_ext.bench import launched
from axonn_ext.bench.output import check_outputs, dots, exit_status, subtitle, write_plot
from axonn_ext.bench.results import content_of
from axonn_ext.bench.train import options, report
from axonn_ext.bench.train.plan import (
    BASELINES,
    FIXED,
    OURS,
    SINGLE,
    WEAK,
    MemoryUse,
    Plan,
    Row,
    SystemSpec,
    Workload,
)
from axonn_ext.calibrate.this_machine import check_device, describe_machine, num_cores
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.terminal.memory import memory_problem
from axonn_ext.terminal.rows import RowsFile

DEFAULT_NPROC = 4
# On a rank that holds the whole parameter: in fp32, weight, gradient and two moments; in bf16 and
# fp16, two bytes each of weight and gradient, and a master weight and two moments in fp32.
BYTES_OF_A_PARAMETER = 16


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    options.add_parser(commands, run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if a system does not train like the others."""
    here = process.this_process()
    console = Console()
    if args.worker is not None:
        here = here or Process()
        launched.do_plan(args.worker, here, Plan, partial(_run_here, here, console))
        leave(0)
    if here is None or here.rank == 0:
        check_outputs(args)
    plans = make_plans(args, here)
    machine = describe_machine(threads=1, device=args.device)
    with RowsFile("--json", args.json) as file:
        if here is None:
            rows = _launch_all(
                plans, console, weigh=not args.no_memory,
                write=lambda rows: file.write(content_of(machine, rows)),
            )  # fmt: skip
        else:
            found = _run_here(here, console, plans[0])
            assert isinstance(found, list)
            rows = found
            if here.rank == 0:
                file.write(content_of(machine, rows))
    if here is None or here.rank == 0:
        cores, note = num_cores(), [] if args.device == "cuda" else ["one thread a rank"]
        report.print_rows(console, rows, cores=cores)
        line = subtitle(machine, *note, args.dtype)
        draw = partial(report.plot_rows, rows, line, scaling=args.scaling, cores=cores)
        write_plot(args, console, draw=draw)
    status = exit_status(rows)
    if here is not None:
        leave(status)
    return status


def _run_here(here: Process, console: Console, plan: Plan) -> list[Row] | MemoryUse:
    """Runs a plan in the processes that already exist."""
    # Imported here, since it needs torch's distributed part, which takes a second to load.
    from axonn_ext.bench.train.run import time_systems, weigh_system

    def tell(text: str) -> None:
        if here.rank == 0:
            say(console, text, style="dim")

    # `single` sets more threads for its own steps.
    with launched.meeting("train", plan, here, plan.device):
        if plan.what == "memory":
            return weigh_system(plan)
        return time_systems(plan, dots(console, here), tell=tell)


def leave(status: int) -> NoReturn:
    """Ends this process at once.

    Torch's mesh caches keep gloo's threads alive until the end. If such a thread frees a tensor
    while Python shuts down, Python stops the thread at a place where C++ can only abort.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def make_plans(args: argparse.Namespace, here: Process | None = None) -> list[Plan]:
    """Returns the launches for the arguments, one for each number of ranks.

    Raises: UserError with all problems that were found.
    """
    options.fill_in(args)
    check_device(args.device)
    most = _num_ranks(args, here)
    if args.device == "cuda" and most > torch.cuda.device_count():
        raise UserError(
            f"bench train: {most} ranks on --device cuda need a GPU each, there are "
            f"{torch.cuda.device_count()}"
        )
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
                (*baselines, *ours), num_ranks=count, rounds=args.rounds, device=args.device,
                single_threads=num_cores() if args.device == "cpu" else 1,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None
        plans.append(plan)
        # All systems exist at once. With ddp, every rank has the whole model.
        copies = sum(count if spec.kind == "ddp" else 1 for spec in plan.systems)
        num_bytes = copies * plan.workload.model.num_parameters() * BYTES_OF_A_PARAMETER
        problem = memory_problem(
            f"training {copies} copies of the model at once", num_bytes, args.device
        )
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
            raise UserError("--strong and --weak start processes: run them without torchrun")
        if here.local_world_size != here.world_size:
            raise UserError("bench train: all ranks must be on one host, whose clock they share")
        return here.world_size
    if args.nproc is not None:
        return int(args.nproc)
    grids = [parse_grid("--grid", text) for text in args.grid or ()]
    for grid in grids:
        check_processes(grid)
    default = torch.cuda.device_count() if args.device == "cuda" else DEFAULT_NPROC
    return max((grid.size for grid in grids), default=default)


def _grids(args: argparse.Namespace, count: int, most: int) -> list[GridShape]:
    """Returns the given grids of `count` ranks, or else the default grid.

    Raises: UserError for a grid whose number of ranks no launch has.
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


def _launch_all(
    plans: Sequence[Plan], console: Console, *, weigh: bool,
    write: Callable[[Sequence[Row]], None],
) -> list[Row]:  # fmt: skip
    """Starts one launch after another. write: receives all rows whenever there is a new one."""
    rows: list[Row] = []
    for plan in plans:
        text = f"timing {len(plan.systems)} systems, {plan.num_ranks} ranks"
        say(console, text, style="dim")
        timed = launched.from_plain(list[Row], launched.start("train", plan, plan.num_ranks))
        write([*rows, *timed])
        for i, (spec, row) in enumerate(zip(plan.systems, timed, strict=True)):
            if weigh and row.problem is None and row.memory is None:
                timed[i] = dataclasses.replace(row, memory=_weigh(plan, spec, console))
                write([*rows, *timed])
        rows += timed
    return rows


def _weigh(plan: Plan, spec: SystemSpec, console: Console) -> MemoryUse:
    """Measures the peak memory of one system, which runs in its own processes."""
    say(console, f"memory of {spec.name}", style="dim")
    num_ranks = 1 if spec.kind == SINGLE else plan.num_ranks
    alone = dataclasses.replace(plan, what="memory", systems=(spec,), num_ranks=num_ranks)
    return MemoryUse(**launched.start("train", alone, num_ranks))
