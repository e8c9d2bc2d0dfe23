"""`axonn-ext plan`: the fastest ways to train a model on a number of GPUs; needs no Torch."""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from pathlib import Path
from typing import Any

from axonn_ext.cli.plan import beside, explain, like, output, report, sensitivity, study, sweep
from axonn_ext.cli.plan.budget import Budget
from axonn_ext.cli.plan.request import AUTO, make_request
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import WIDTHS
from axonn_ext.planner.machines.machine import machine_names
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.planner.search.fastest import Plan, plan
from axonn_ext.planner.search.frameworks import FRAMEWORKS
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.search.sensitivity import variants
from axonn_ext.spec import settings
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.optimizer import OFFLOADS, ZERO_STAGES
from axonn_ext.spec.parallel import LAYOUTS, Overlap
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.presets import PRESETS
from axonn_ext.spec.recompute import EXPECTED, is_policy
from axonn_ext.terminal.arguments import add_key, new_parser, number, whole
from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import UserError

DESCRIPTION = """\
Predicts which grid, layout, micro-batches, recomputation and overlap train a model fastest on a
number of GPUs, how long a step takes, what it waits for, and what each GPU holds. Needs no GPU.
docs/planner.md explains options and output; docs/planner_fit.md, how far off predictions were."""

EPILOG = """\
examples:
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048
  axonn-ext plan --model llama3-8b --gpus 64 --machine dgx-h100 --global-batch-tokens 4194304 \\
      --explain 1 --timeline step.json
  axonn-ext plan --model gpt2-small --gpus 8 --machine this --global-batch 32 --dtype fp32 \\
      --write-config fastest.toml
your own grid next to the best one, and what other frameworks would choose:
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048 \\
      --grid x=8,y=1,data=2..16
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048 --like all
many jobs at once:
  axonn-ext plan --model gpt-320b --machine frontier --global-batch 4096 \\
      --sweep weak=512..32768 --plot weak.png
  axonn-ext plan --machine frontier --global-batch 8192 --csv series.csv \\
      --series 512:gpt-5b,1024:gpt-10b,2048:gpt-20b
published studies next to the planner's predictions:
  axonn-ext plan --study axonn-2024 --plot series.png
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        commands, "plan", run, description=DESCRIPTION, epilog=EPILOG,
        usage="axonn-ext plan --model NAME --machine NAME --gpus N --global-batch N [OPTION ...]",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", metavar="NAME|FILE.toml|FOLDER",
        help=f"model to train: {', '.join(PRESETS)}, a TOML file of axonn-ext train, or a Hugging "
        "Face folder")  # fmt: skip
    add("--machine", metavar="NAME|FILE.toml",
        help=f"machine to plan for: {', '.join(machine_names())}, a machine file, or this, as "
        "measured here by axonn-ext bench links")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="replacement for a value of the machine file, such as levels.node.bytes_per_s=2e11; "
        "may be given several times")  # fmt: skip
    add("--gpus", type=whole(0), metavar="N",
        help="number of GPUs, one rank each")  # fmt: skip
    batch = parser.add_mutually_exclusive_group()
    either = batch.add_argument
    either("--global-batch", type=whole(), metavar="N",
           help="sequences per optimizer step, over all GPUs")  # fmt: skip
    either("--global-batch-tokens", type=whole(), metavar="N",
           help="tokens per optimizer step, over all GPUs: a multiple of the sequence "
           "length")  # fmt: skip
    add("--seq", type=whole(), metavar="S", help="tokens per sequence (default: the model's)")
    add("--dtype", choices=tuple(WIDTHS), default="bf16",
        help="dtype of weights and activations (default: %(default)s)")  # fmt: skip
    add("--tokens", type=number(above=0), default=1e12, metavar="T",
        help="tokens of the whole training run, to predict days, GPU-hours, cost and energy "
        "(default: 1e12)")  # fmt: skip
    add("--price", type=number(above=0), metavar="P",
        help="price of one GPU hour; adds a cost column")  # fmt: skip
    add("--study", metavar="NAME|list|all",
        help="published study to compare with the planner's predictions, instead of planning a "
        "job; list: show the names; all: compare all of them")  # fmt: skip
    _add_many(parser.add_argument_group("several jobs, each with its best configuration"))
    _add_fixed(parser.add_argument_group("limits of the search"))
    _add_outputs(parser.add_argument_group("output"))
    parser.set_defaults(defaults=vars(parser.parse_args([])))


def _add_many(group: argparse._ArgumentGroup) -> None:
    kinds = "; ".join(
        f"{kind}: {what}" for kind, (what, _) in sweep.SWEEPS.items() if kind != sweep.SERIES
    )
    either = group.add_mutually_exclusive_group().add_argument
    either("--sweep", type=sweep.parse_sweep, metavar="NAME=A..B|NAME=A,B,...",
           help="quantity that differs between the jobs, and its values: A, 2 A, 4 A, ... B, or "
           f"those given. {kinds}")  # fmt: skip
    either("--series", type=sweep.parse_series, metavar="GPUS:MODEL,...",
           help="pairs of a number of GPUs and a model, all with the same batch")  # fmt: skip


def _add_fixed(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--grid", type=_axes, default=AxisRules(), metavar="AXIS=SIZE,...",
        help="allowed sizes of axes: 8, 2..16, !8 (any but 8), node (groups inside a node) or * "
        "(any, as without a condition). The best of these grids is shown next to the best of "
        "all")  # fmt: skip
    add_key(group, Request, "max_pipe", flag="--pipe", dest="pipe", default=1, metavar="N")
    add("--schedule", choices=SCHEDULES,
        help="schedule of the pipeline stages of --pipe (default: the fastest)")  # fmt: skip
    add("--layout", choices=LAYOUTS, help="layout of activations (default: the faster)")
    add("--micro-batches", type=whole(), metavar="N",
        help="number of micro-batches per step (default: the fastest)")  # fmt: skip
    add("--recompute", type=_policy, metavar="POLICY",
        help="activations to recompute in backward: none, attention, every:K (one of K blocks), "
        "every:N/K or full (default: the fastest)")  # fmt: skip
    add("--overlap", type=_overlap, metavar="on|off|KEY=N,...",
        help="overlap of collectives with computation: on (its numbers are searched), off, or some "
        "of prefetch, gathered_bytes, deferred and bucket_bytes (default: the "
        "fastest)")  # fmt: skip
    add("--zero", choices=(*map(str, ZERO_STAGES), AUTO),
        help="ZeRO stage; 1 shards the optimizer's state over the data axis, 2 also gradients; "
        "auto: the faster of 0 and 1 (default: the model's file, or 0)")  # fmt: skip
    add("--offload", choices=(*OFFLOADS, AUTO),
        help="place of AdamW's state: none (the GPU), cpu (host memory) or disk; auto: the faster "
        "of none and cpu (default: the model's file, or none)")  # fmt: skip
    add_key(group, Request, "memory_fraction", default=Request.memory_fraction, metavar="F")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--like", type=like.parse_like, metavar="NAME,...",
        help=f"frameworks whose best choices to show as well: {', '.join(FRAMEWORKS)} "
        "or all")  # fmt: skip
    add("--sensitivity", action="store_true",
        help="show what changes if links are 20 %% slower or faster than in the machine "
        "file")  # fmt: skip
    add_key(group, Request, "top", default=Request.top, metavar="N")
    add("--explain", type=whole(), metavar="N",
        help="itemize memory, time and volumes of the N-th fastest grid")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="write the results to a JSON file, with more digits")  # fmt: skip
    add("--csv", type=Path, metavar="FILE", help="write the results to a CSV file")
    add("--plot", type=Path, metavar="FILE", help="draw the results to a .png, .svg or .pdf file")
    add("--timeline", type=Path, metavar="FILE.json",
        help="write the simulated step of the fastest configuration as a Chrome trace, and draw it "
        "in FILE.png")  # fmt: skip
    add("--write-config", type=Path, metavar="FILE.toml",
        help="write the fastest configuration as a TOML file for axonn-ext train")  # fmt: skip


def _policy(text: str) -> str:
    if not is_policy(text):
        raise argparse.ArgumentTypeError(f"expected {EXPECTED}, got {text!r}")
    return text


def _axes(text: str) -> AxisRules:
    try:
        return AxisRules.parse(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _overlap(text: str) -> str | Overlap:
    """Returns "on", "off", or the given numbers; the others are the trainer's defaults."""
    if text in ("on", "off"):
        return text
    keys = ("prefetch", "gathered_bytes", "deferred", "bucket_bytes")
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in keys or key in given or not re.fullmatch(r"[0-9]{1,18}", value):
            raise argparse.ArgumentTypeError(
                f"expected on, off, or some of {', '.join(keys)} like prefetch=4,deferred=8, each "
                f"once and with a whole number, got {text!r}"
            )
        given[key] = int(value)
    try:
        return dataclasses.replace(Overlap(), **given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    _check(args)
    console = Console()
    try:
        if args.study is not None:
            study.run(console, args)
        elif (asked := args.sweep or args.series) is not None:
            sweep.run(console, args, asked)
        else:
            _run_one(console, args)
    except InputError as error:
        raise UserError(str(error)) from None
    return 0


def _run_one(console: Console, args: argparse.Namespace) -> None:
    """Plans one job; shows and writes the results."""
    began = time.perf_counter()
    request = make_request(args)
    found = plan(request)
    if args.explain is not None and args.explain > len(found.configs):
        raise UserError(
            f"--explain: expected at most {len(found.configs)}, the number of configurations "
            f"found, got {args.explain}"
        )
    result = dataclasses.replace(found, configs=found.configs[: args.top])
    budget = Budget(args.tokens, args.price, request.machine.watts)
    report.print_plan(console, result, budget, seconds=time.perf_counter() - began)
    if args.explain is not None:
        explained = found.configs[args.explain - 1]
        explain.print_explanation(console, explained, request.machine, number=args.explain)
    more, others = _show_more(console, args, result, budget)
    output.write(console, args, result, budget, more, others)


def _show_more(
    console: Console, args: argparse.Namespace, result: Plan, budget: Budget
) -> tuple[dict[str, Any], list[tuple[str, Estimate]]]:
    """Plans and shows what is requested in addition to the plan.

    Returns it as JSON, and the configurations to draw in a picture, with their names.
    """
    request, best = result.request, result.configs[0]
    more: dict[str, Any] = {}
    others: list[tuple[str, Estimate]] = []
    if args.grid.rules:
        of_all = plan(_of_all_grids(request)).configs[0]
        beside.print_beside(console, best, of_all, request.machine)
        others.append(("best of all", of_all))
        more["beside"] = beside.as_json(best, of_all, request.machine)
    if args.like is not None:
        rows = like.plan_rows(args.like, request, best)
        like.print_like(console, rows)
        others += [(row.name, row.best) for row in rows[1:] if row.best is not None]
        more["like"] = like.as_json(rows, request.machine, budget)
    if args.sensitivity:
        changed = list(variants(request, best))
        sensitivity.print_sensitivity(console, changed, best)
        more["sensitivity"] = sensitivity.as_json(changed)
    return more, others


def _of_all_grids(request: Request) -> Request:
    return dataclasses.replace(request, axes=AxisRules(), top=1)


def _check(args: argparse.Namespace) -> None:
    """Raises UserError with all problems that the options have by themselves."""
    here = settings.launch_environment()
    if here is not None and here.world_size > 1:
        raise UserError(
            f"plan runs in one process, got {here.world_size}; start it without torchrun or srun"
        )
    if args.study is not None:
        study.check(args)
        output.check_files(args)
        return
    problems = []
    if args.schedule is not None and args.pipe == 1 and not args.grid.names("pipe"):
        problems.append("--schedule is for pipeline stages: also give --pipe, the most to try")
    asked: sweep.Sweep | None = args.sweep or args.series
    problems += _missing(args, asked)
    for name in ("explain", "like", "sensitivity", "timeline", "write_config"):
        if asked is not None and getattr(args, name):
            problems.append(f"--{name.replace('_', '-')} is of one job, {asked.option} has several")
    if problems:
        raise UserError(*problems)
    output.check_files(args)


def _missing(args: argparse.Namespace, asked: sweep.Sweep | None) -> list[str]:
    """Returns what is missing of machine, model, GPUs and batch, or already set by the sweep."""
    decided = () if asked is None else sweep.SWEEPS[asked.kind][1]
    problems = [
        f"--{name.replace('_', '-')} is decided by {asked.option}, got {getattr(args, name)}"
        for name in decided
        if asked is not None and getattr(args, name) is not None
    ]
    for options, names in (
        ("--machine, or --study", ("machine",)),
        ("--model, unless --series names models", ("model",)),
        ("--gpus, or --sweep or --series with numbers of GPUs", ("gpus",)),
        ("--global-batch, --global-batch-tokens or --sweep batch",
         ("global_batch", "global_batch_tokens")),
    ):  # fmt: skip
        if all(getattr(args, name) is None and name not in decided for name in names):
            problems.append(f"expected {options}")
    return problems
