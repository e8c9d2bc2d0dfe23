"""`axonn-ext bench ranking`: compares the planner's order of all grids with the measured order."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from axonn_ext.bench import launched
from axonn_ext.bench.benchmark import add_run_options
from axonn_ext.bench.ranking_cases import (
    CASES,
    DEEP,
    Config,
    Launch,
    Pipelines,
    Times,
    default_models,
    legal_configs,
    predict,
)
from axonn_ext.calibrate.find_machine import find_machine
from axonn_ext.calibrate.this_machine import describe_machine
from axonn_ext.planner import Machine
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec import settings
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import FileError, read_json
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.terminal.arguments import MOST_PROCESSES, new_parser, whole
from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable, write_text

TOP = 3
GOOD_ENOUGH = 0.05  # a configuration this close to the best time is as good as the best
MIN_CORRELATION = 0.8
_SCHEDULES = tuple(name for name in SCHEDULES if name != "interleaved")  # it needs two chunks each
DESCRIPTION = """\
Trains small models on every grid of N ranks, one CPU thread each, and compares the ranking of their
times with the planner's. With --pipe, also on grids with pipeline stages. Useful with emulated
links of different speeds (AXONN_EMULATED_LINKS); run `axonn-ext bench links` with the same links
and ranks before. (Messages between stages cross the host's memory, not an emulated link.) Exit
status 1 if the planner's ranking is of no use: none of its first three is within 5 % of the best,
or the rank correlation is below 0.8."""
EPILOG = """\
example:
  export AXONN_EMULATED_LINKS=x=0.04,y=0.02,z=0.01,data=0.005
  axonn-ext bench links --nproc 8
  axonn-ext bench ranking --nproc 8 --json ranking.json --markdown ranking.md
  axonn-ext bench ranking --nproc 4 --pipe 4
  axonn-ext bench ranking --nproc 8 --overlap
"""


# --- The two orders ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A configuration and its `Times`. schedule: that of Config."""

    grid: str
    layout: str
    schedule: str
    predicted_s: float
    fastest_s: float
    median_s: float
    spread_s: float


@dataclass(frozen=True)
class Verdict:
    """How well the orders agree.

    spearman: the rank correlation. gap: how much slower the best of the planner's top
    configurations is than the best of all.
    """

    spearman: float
    gap: float

    @property
    def useful(self) -> bool:
        return self.spearman >= MIN_CORRELATION and self.gap <= GOOD_ENOUGH


def judge(rows: Sequence[Row], *, top: int = TOP) -> Verdict:
    """Compares the orders. Raises ValueError unless there are more rows than `top`."""
    if len(rows) <= top:
        raise ValueError(f"judge: expected more than {top} rows, got {len(rows)}")
    first = sorted(rows, key=lambda row: row.predicted_s)[:top]
    measured = [row.fastest_s for row in rows]
    gap = min(row.fastest_s for row in first) / min(measured) - 1
    return Verdict(spearman([row.predicted_s for row in rows], measured), gap)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the correlation of the ranks; equal values get the mean of their ranks."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    less = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [count + (same - 1) / 2 for count, same in zip(less, equal, strict=True)]


def markdown(title: str, rows: Sequence[Row], verdict: Verdict) -> str:
    """Returns a table in the planner's order."""
    measured = sorted(row.fastest_s for row in rows)
    lines = [
        f"{title}: Spearman {verdict.spearman:.2f}; the best of the planner's first {TOP} is "
        f"{verdict.gap:.1%} slower than the best of all.",
        "",
        "| planner | measured | grid | layout | schedule | predicted ms | least ms | median ms "
        "| spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for place, row in enumerate(sorted(rows, key=lambda row: row.predicted_s), 1):
        lines.append(
            f"| {place} | {measured.index(row.fastest_s) + 1} | {row.grid} | {row.layout} "
            f"| {row.schedule} "
            f"| {row.predicted_s * 1e3:,.0f} | {row.fastest_s * 1e3:,.0f} "
            f"| {row.median_s * 1e3:,.0f} | {row.spread_s / row.median_s:.0%} |"
        )
    return "\n".join([*lines, ""])


# --- The command ---------------------------------------------------------------------------------


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        benchmarks, "ranking", run, help="the planner's ranking of grids against the measured one",
        description=DESCRIPTION, epilog=EPILOG,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", action="append", choices=tuple(CASES), metavar="NAME",
        help=f"model to train: {', '.join(CASES)}; may be given several times (default: with "
        f"--pipe {DEEP}, else all others)")  # fmt: skip
    add("--nproc", type=whole(1, MOST_PROCESSES), default=8, metavar="N",
        help="number of ranks to start (default: %(default)s)")  # fmt: skip
    add("--pipe", type=whole(), default=1, metavar="N",
        help="largest number of pipeline stages (default: %(default)s)")  # fmt: skip
    add("--schedule", choices=_SCHEDULES,
        help=f"schedule of the pipeline stages (default: {PipelineOptions.schedule})")  # fmt: skip
    add("--micro-batches", type=whole(), metavar="N",
        help="largest number of micro-batches per step on grids with stages (default: "
        f"{Pipelines.micro_batches})")  # fmt: skip
    add("--overlap", action="store_true",
        help="overlap the collectives of weights and gradients with computation (default: wait for "
        "each)")  # fmt: skip
    add("--machine", default="this", metavar="NAME|FILE.toml",
        help="machine that the planner plans for (default: this, as measured by bench "
        "links)")  # fmt: skip
    add("--times", type=Path, metavar="FILE",
        help="JSON file of an earlier run, whose times to use instead of measuring")  # fmt: skip
    add("--markdown", type=Path, metavar="FILE", help="write the tables to a Markdown file")
    add_run_options(parser, rounds=5, plots=False)
    add("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    here = process.this_process()
    if args.worker is not None:
        here = here or Process()
        launched.do_plan(args.worker, here, Launch, partial(_time_here, here))
        return 0
    if here is not None:
        raise UserError("bench ranking starts its own processes; start it without torchrun")
    for option, path in (("--json", args.json), ("--markdown", args.markdown)):
        check_writable(option, path)
    pipelines, machine = _pipelines(args), _machine(args.machine)
    console = Console()
    results = {}
    for name in args.model or default_models(pipelines):
        results[name] = _rank(name, args, pipelines, machine)
        table = markdown(name, results[name], judge(results[name]))
        console.print(table, highlight=False, markup=False, soft_wrap=True)
    _write(args, results)
    return 0 if all(judge(rows).useful for rows in results.values()) else 1


def _time_here(here: Process, plan: Launch) -> list[Times]:
    """Times the plan's configurations on one rank."""
    # Imported here, since torch's distributed part takes a second to load.
    from axonn_ext.bench.ranking_ranks import time_configs

    with launched.meeting("ranking", plan, here, "cpu"):
        return time_configs(plan)


def _pipelines(args: argparse.Namespace) -> Pipelines:
    if args.pipe == 1 and (args.schedule or args.micro_batches):
        raise UserError("--schedule and --micro-batches need pipeline stages: give --pipe")
    return Pipelines(
        args.pipe, PipelineOptions(args.schedule or PipelineOptions.schedule),
        args.micro_batches or Pipelines.micro_batches,
    )  # fmt: skip


def _machine(name: str) -> Machine:
    try:
        return find_machine(name)
    except InputError as error:
        raise UserError(f"--machine: {error}") from None


def _rank(name: str, args: argparse.Namespace, pipelines: Pipelines, machine: Machine) -> list[Row]:
    """Predicts all grids before timing them, so that predictions cannot depend on the times."""
    case = CASES[name]
    configs = legal_configs(case, args.nproc, pipelines, overlaps=args.overlap)
    if len(configs) <= TOP:
        raise UserError(
            f"--nproc: {name} can be trained on {len(configs)} grids of {args.nproc} ranks, "
            f"expected more than {TOP}"
        )
    try:
        predicted = [predict(case, config, machine) for config in configs]
    except InputError as error:
        raise UserError(f"--machine: {error}") from None
    if args.times is None:
        text = f"timing {name} on {len(configs)} grids of {args.nproc} ranks"
        Console(stderr=True).print(text, style="dim", highlight=False)
        plan = Launch(case, configs, args.rounds)
        found = launched.start("ranking", plan, args.nproc)
        measured = [Times(*times) for times in found]
    else:
        measured = _read_times(args.times, name, configs)
    return [
        Row(config.grid.short(), config.layout, config.schedule, seconds, *times)
        for config, seconds, times in zip(configs, predicted, measured, strict=True)
    ]


def _read_times(path: Path, name: str, configs: Sequence[Config]) -> list[Times]:
    """Reads the times of these configurations from the file of an earlier run."""
    try:
        models = read_json(path)["models"]
        rows = [Row(**row) for model in models if model["model"] == name for row in model["rows"]]
        for row in rows:
            if not all(_is_time(t) for t in (row.fastest_s, row.median_s, row.spread_s)):
                raise TypeError(f"times of {row.grid}: expected numbers >= 0")
    except FileError as error:
        raise UserError(f"--times: {error}") from None
    except (KeyError, TypeError) as error:
        raise UserError(f"--times: {path} is not the --json of such a run: {error!r}") from None
    known = {
        (row.grid, row.layout, row.schedule): Times(row.fastest_s, row.median_s, row.spread_s)
        for row in rows
    }
    keys = [(config.grid.short(), config.layout, config.schedule) for config in configs]
    missing = [" ".join(key) for key in keys if key not in known]
    if missing:
        raise UserError(f"--times: {path} has no times of {name} on {', '.join(missing)}")
    return [known[key] for key in keys]


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < sys.float_info.max


def _write(args: argparse.Namespace, results: dict[str, list[Row]]) -> None:
    verdicts = {name: judge(rows) for name, rows in results.items()}
    if args.json is not None:
        models = [
            {"model": name, **dataclasses.asdict(verdicts[name]),
             "rows": [dataclasses.asdict(row) for row in rows]}
            for name, rows in results.items()
        ]  # fmt: skip
        content = {
            "machine": describe_machine(threads=1),
            "emulated_links": dict(settings.load().emulated_links),
            "models": models,
        }
        write_text("--json", args.json, json.dumps(content, indent=1) + "\n")
    if args.markdown is not None:
        tables = [markdown(name, rows, verdicts[name]) for name, rows in results.items()]
        write_text("--markdown", args.markdown, "\n".join(tables))
