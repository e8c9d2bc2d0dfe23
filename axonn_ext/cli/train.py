"""`axonn-ext train`: trains a model, in the processes that torchrun started or in its own."""

from __future__ import annotations

import argparse
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import Store

from axonn_ext.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.preemption import SIGNALS
from axonn_ext.spec import settings
from axonn_ext.terminal.arguments import MOST_PROCESSES, new_parser, whole
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.terminal.grids import check_processes
from axonn_ext.train.claim import claimed
from axonn_ext.train.config import AUTO, EXAMPLES, Config
from axonn_ext.train.config_file import Override, all_keys, load_config, to_toml
from axonn_ext.train.job import check_memory, prepare
from axonn_ext.train.run_folder import check_folder, default_folder, first_day
from axonn_ext.train.watchdog.summary import SIGNAL, reason_for_failure, summaries
from axonn_ext.train.worker import run_worker

DESCRIPTION = """\
Trains a model on a grid of processes. The run's folder gets metrics.jsonl,
config.toml, loss.png and, if requested, checkpoints."""

EPILOG = """\
examples:
  axonn-ext train --config examples/demo.toml --grid x=2,y=2      starts 4 processes
  torchrun --nproc-per-node 8 -m axonn_ext train --config examples/demo.toml --grid 2x2x2
  axonn-ext train --nproc 8 --config examples/demo.toml --grid auto
  axonn-ext train --model.hidden_size 384 --optim.lr=3e-4 --data.text ~/books --out runs/books
  axonn-ext train --config examples/demo.toml --train.steps 50 --print-config > my.toml

Any key of the configuration can be set with --TABLE.KEY VALUE. The keys and their defaults:

"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        commands, "train", run, keys=all_keys,
        description=DESCRIPTION, epilog=EPILOG + to_toml(Config()),
        usage="axonn-ext train [--config FILE] [--grid SHAPE] [OPTION ...] [--TABLE.KEY VALUE ...]",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="TOML file with the configuration; keys that it leaves out have the defaults below",
    )  # fmt: skip
    parser.add_argument(
        "--grid", metavar="SHAPE",
        help="grid of processes: x=2,y=2,z=1,data=1,pipe=1 (axes left out have size 1), 2x2x1 for "
        "x, y and z, or auto, the planner's fastest for --nproc N (default: the configuration's)",
    )  # fmt: skip
    parser.add_argument(
        "--machine", metavar="NAME|FILE.toml",
        help="machine that --grid auto plans for (default: this one as measured by axonn-ext bench "
        "links, otherwise a similar known one)",
    )  # fmt: skip
    add_nproc(parser)
    add_folder_options(parser, "CONFIG", "; sets checkpoint.resume")
    parser.add_argument(
        "--profile", action="store_true",
        help="write profile.json, a Chrome trace of three steps: computation and collectives; on "
        "GPUs also memory.pickle, their allocations, for https://pytorch.org/memory_viz",
    )  # fmt: skip
    parser.add_argument(
        "--print-config", action="store_true",
        help="print the resulting configuration as TOML, with the meaning of each key, and exit",
    )  # fmt: skip


def add_nproc(parser: argparse.ArgumentParser) -> None:
    """Adds --nproc."""
    parser.add_argument(
        "--nproc", type=whole(1, MOST_PROCESSES), metavar="N",
        help="number of processes to start on this machine (default: the size of the grid)",
    )  # fmt: skip


def add_folder_options(parser: argparse.ArgumentParser, name: str, note: str = "") -> None:
    """Adds --out, --overwrite, --resume and --rank-order.

    name: begins the name of the default folder. note: ends the help of --resume
    """
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help=f"new or empty folder for the run (default: runs/{name}-DATE-TIME)",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in --out")
    parser.add_argument(
        "--resume", metavar="auto|PATH",
        help="continue from a checkpoint, on any grid: auto for the latest in --out, if there is "
        f"one, or the folder of a checkpoint or of a run{note}",
    )  # fmt: skip
    parser.add_argument(
        "--rank-order", metavar="natural|FILE",
        help="order of the hosts, so that neighbouring ranks are close: natural (gpu1, gpu2, "
        "gpu10), or a file with a line HOST or HOST SWITCH/DOMAIN per host (default: as launched)",
    )  # fmt: skip


def run(args: argparse.Namespace, extra: Sequence[str], *, note: str = "") -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages.

    note: a line to show above those of the run, once all checks have passed
    """
    # Until a watchdog listens, the signal would end the process.
    signal.signal(SIGNAL, signal.SIG_IGN)
    overrides = parse_overrides(extra)
    if args.resume is not None:
        overrides += (Override("checkpoint.resume", args.resume),)
    here = process.this_process()
    config, store = _load(args, overrides, here)
    if args.print_config:
        if here is None or here.rank == 0:
            print(to_toml(config), end="")
        return 0
    with process.checking(here, store):
        if config.checkpoint.resume == AUTO and args.out is None:
            raise UserError("--resume auto goes on with the run in --out FOLDER: name that folder")
        if here is not None and args.nproc is not None:
            raise UserError("--nproc starts processes itself; leave it out under torchrun or srun")
    folder = args.out or default_folder(args.config)
    config = _dated(config, folder, here, store)
    if here is not None:
        if args.rank_order is not None and store is not None and here.world_size > 1:
            from axonn_ext.ranks.launch.order import in_rank_order

            here = in_rank_order(store, here, args.rank_order, host=socket.gethostname())
            settings.take_rank(here.rank)
        run_worker(
            config, here, folder=folder, overwrite=args.overwrite, profile=args.profile, store=store
        )
        return 0
    try:
        _run_here(args, config, folder, overrides, note=note)
    except KeyboardInterrupt as error:
        said = str(error) or _interrupted(config, folder, overwrite=args.overwrite)
        raise KeyboardInterrupt(said) from None
    return 0


def _run_here(
    args: argparse.Namespace, config: Config, folder: Path, overrides: Sequence[Override], *,
    note: str,
) -> None:  # fmt: skip
    """Runs the job without another launcher, in this process or in processes of its own."""
    world_size = _world_size(config, args.nproc)
    if world_size == 1:
        run_worker(
            config, Process(), folder=folder, overwrite=args.overwrite, profile=args.profile,
            note=note,
        )  # fmt: skip
        return
    with claimed(folder):
        resumes = config.checkpoint.resume == AUTO
        check_folder(folder, overwrite=args.overwrite, resumes=resumes)
        check_memory(prepare(config, world_size=world_size), ranks_here=world_size)
        if note:
            from axonn_ext.terminal.console import Console, say  # loads rich

            say(Console(), note)
        _launch(world_size, _worker_arguments(args, config, folder, overrides), config, folder)


def _interrupted(config: Config, folder: Path, *, overwrite: bool) -> str:
    """Says what a run has saved that was interrupted at once, if all there is its own."""
    if overwrite:
        return "interrupted"
    if not config.checkpoint.interval:
        return "interrupted; no weights were saved: checkpoint.interval is 0"
    latest = CheckpointFolder(folder / CHECKPOINTS).latest()
    if latest is None:
        return "interrupted; no checkpoint was saved"
    return (
        f"interrupted; the last checkpoint is {latest}. To go on, run the same command with "
        f"--resume auto --out {folder}"
    )


def _launch(world_size: int, arguments: Sequence[str], config: Config, folder: Path) -> None:
    """Runs the processes. If the job fails, the message includes a watchdog's findings."""
    from axonn_ext.ranks.launch.launcher import launch  # ranks do not need it

    forwarded = (SIGNAL, *SIGNALS) if config.checkpoint.interval else (SIGNAL,)
    before = summaries(folder)
    try:
        launch(world_size, arguments, forwarded=forwarded)
    except TrainingError as error:
        reason = reason_for_failure(folder, known=before)
        raise (error if reason is None else TrainingError(f"{reason}\n{error}")) from None


def _dated(config: Config, folder: Path, here: Process | None, store: Store | None) -> Config:
    """Returns the configuration with rank 0's date, which chat templates use."""
    uses_templates = config.data.order == EXAMPLES or config.train.samples
    if not uses_templates or config.data.date:
        return config
    day = partial(first_day, config, folder)
    if here is not None and store is not None:
        text = process.settled_by_rank_0(store, here, day, topic="date")
    else:
        text = day()
    return replace(config, data=replace(config.data, date=text))


def _is_auto(args: argparse.Namespace) -> bool:
    return args.grid is not None and args.grid.strip() == "auto"


def _load(
    args: argparse.Namespace, overrides: tuple[Override, ...], here: Process | None
) -> tuple[Config, Store | None]:
    """Returns the configuration with its grid, and the store if one was opened.

    With --grid auto, rank 0 chooses the grid and tells the other ranks through the store.
    """
    store = None
    is_auto = _is_auto(args)
    if here is not None and (is_auto or not args.print_config):
        store = process.open_store(here)
        said = {"the command": "train", "whether --grid is auto": str(is_auto)}
        said["--rank-order"] = str(args.rank_order)
        process.meet(store, here, lambda: said)
    with process.checking(here, store):
        return _load_config(args, overrides, here, store), store


def _load_config(
    args: argparse.Namespace, overrides: tuple[Override, ...], here: Process | None,
    store: Store | None,
) -> Config:  # fmt: skip
    """Returns the configuration, with the grid that rank 0 has chosen for --grid auto."""
    if not _is_auto(args):
        if args.machine is not None:
            raise UserError(
                f"--machine needs --grid auto, got --grid {args.grid or 'of the configuration'}"
            )
        return load_config(args.config, grid=args.grid, overrides=overrides)
    given = [f"--{override.key}" for override in overrides if override.key.startswith("grid.")]
    if given:
        raise UserError(f"--grid auto chooses all axes; leave out {', '.join(given)}")
    world_size = args.nproc if here is None else here.world_size
    if world_size is None:
        raise UserError(
            "--grid auto: the planner needs the number of processes: give --nproc N, or start with "
            "torchrun"
        )
    config = load_config(args.config, overrides=overrides)
    from axonn_ext.train.auto_grid import choose_grid  # loads the planner, so only if needed

    def choose() -> str:
        choice = choose_grid(config, world_size=world_size, machine=args.machine)
        if not args.print_config:
            print(choice.describe())
        return str(choice.grid)

    if here is None or store is None:
        grid = choose()
    else:
        grid = process.settled_by_rank_0(store, here, choose, topic="grid")
    return load_config(args.config, grid=grid, overrides=overrides)


def parse_overrides(arguments: Sequence[str], command: str = "train") -> tuple[Override, ...]:
    """Returns the dotted overrides `--table.key value` and `--table.key=value`.

    Raises: UserError for any other argument.
    """
    overrides: list[Override] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        match = re.fullmatch(r"--([\w-]+\.[\w.-]+)(?:=(.*))?", argument, flags=re.DOTALL)
        if match is None:
            raise UserError(
                f"unknown argument {argument}: expected an option of axonn-ext {command} --help, "
                "or --TABLE.KEY VALUE"
            )
        key, text = match[1].replace("-", "_"), match[2]
        if text is None:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{key}: expected a value after it, got none")
            text = rest.pop(0)
        overrides.append(Override(key, text))
    return tuple(overrides)


def _world_size(config: Config, nproc: int | None) -> int:
    """Returns the number of processes to start."""
    check_processes(config.grid)
    return config.grid.size if nproc is None else nproc


def _worker_arguments(
    args: argparse.Namespace, config: Config, folder: Path, overrides: Sequence[Override]
) -> list[str]:
    """Returns the arguments of a worker: those of this process, with the chosen folder and grid."""
    arguments = ["train", "--out", str(folder)]
    if args.config is not None:
        arguments += ["--config", str(args.config)]
    if args.grid is not None:
        arguments += ["--grid", str(config.grid)]
    if args.overwrite:
        arguments.append("--overwrite")
    if args.profile:
        arguments.append("--profile")
    return arguments + [f"--{override.key}={override.text}" for override in overrides]
