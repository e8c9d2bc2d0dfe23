"""`axonn-ext plan`: the fastest ways to train a model on a number of GPUs; needs no Torch."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext import settings
from axonn_ext.calibrate.find_machine import find_machine
from axonn_ext.cli import plan_files, plan_report, plan_scaling
from axonn_ext.inputs.errors import InputError
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import WIDTHS
from axonn_ext.planner.model_files import load_model, load_optimizer
from axonn_ext.planner.pipelines import pipeline_timeline
from axonn_ext.planner.search.fastest import Plan, plan
from axonn_ext.planner.search.remedies import smallest_that_fits
from axonn_ext.planner.search.request import PIPELINES, Request
from axonn_ext.planner.timeline import timeline
from axonn_ext.spec.optimizer import OFFLOADS, ZERO_STAGES
from axonn_ext.spec.parallel import LAYOUTS, Overlap
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.recompute import EXPECTED, is_policy
from axonn_ext.terminal.arguments import number, whole
from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.terminal.files import check_picture, check_writable, writing

DESCRIPTION = """\
Predicts which grid, layout, micro-batches, recomputation and overlap train a model fastest on a
number of GPUs, how long a step takes, what it waits for, and what each GPU holds. Needs no GPU.
docs/planner.md tells what is modelled, and how far predictions were off."""

EPILOG = """\
examples:
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048
  axonn-ext plan --model llama3-8b --gpus 64 --machine dgx-h100 --global-batch-tokens 4194304 \\
      --explain 1 --timeline step.json
  axonn-ext plan --model gpt2-small --gpus 8 --machine this --global-batch 32 --dtype fp32 \\
      --write-config fastest.toml
  axonn-ext plan --model gpt-320b --machine frontier --global-batch 4096 --weak 512..32768 \\
      --plot weak.png
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "plan", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|FILE.toml|FOLDER",
        help="a known one, the trainer's TOML, or a folder with Hugging Face's "
        "config.json")  # fmt: skip
    add("--machine", required=True, metavar="NAME|FILE.toml",
        help="a known one, a file, or this: what axonn-ext bench links measured "
        "here")  # fmt: skip
    add("--gpus", type=whole(0), metavar="N", help="ranks of the job")
    batch = parser.add_mutually_exclusive_group(required=True)
    either = batch.add_argument
    either("--global-batch", type=whole(), metavar="N",
           help="sequences of an optimizer step, over all GPUs")  # fmt: skip
    either("--global-batch-tokens", type=whole(), metavar="N", help="the same, in tokens")
    add("--seq", type=whole(), metavar="S", help="tokens of a sequence (default: the model's)")
    add("--dtype", choices=tuple(WIDTHS), default="bf16", help="(default: %(default)s)")
    add("--tokens", type=number(above=0), default=1e12, metavar="T",
        help="budget of the training, for the column of days (default: 1e12)")  # fmt: skip
    _add_fixed(parser.add_argument_group("fix what would be searched"))
    _add_outputs(parser.add_argument_group("output"))
    parser.set_defaults(run=run)


def _add_fixed(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--pipe", type=whole(), default=1, metavar="N",
        help="the most pipeline stages that are tried (default: %(default)s)")  # fmt: skip
    add("--schedule", choices=SCHEDULES, help="of a pipeline")
    add("--layout", choices=LAYOUTS)
    add("--micro-batches", type=whole(), metavar="N", help="parts that a step is computed in")
    add("--recompute", type=_policy, metavar="POLICY",
        help="none, attention, every:K (one of K blocks), every:N/K or full")  # fmt: skip
    add("--overlap", type=_overlap, metavar="on|off|KEY=N,...",
        help="on: with it, its numbers are searched; or these, out of prefetch, gathered_bytes, "
        "deferred and bucket_bytes")  # fmt: skip
    add("--zero", type=int, choices=ZERO_STAGES,
        help="what ranks of data divide: nothing, AdamW's state, gradients too (default: the "
        "model's file, or 0)")  # fmt: skip
    add("--offload", choices=OFFLOADS,
        help="where AdamW's state is (default: the model's file, or none)")  # fmt: skip
    add("--memory-fraction", type=number(above=0, most=1), metavar="F",
        default=Request.memory_fraction,
        help="of what is usable of a GPU's memory (default: %(default)s)")  # fmt: skip


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--top", type=whole(), default=10, metavar="N",
        help="grids to show, each with its best options (default: %(default)s)")  # fmt: skip
    add("--explain", type=whole(), metavar="N",
        help="itemise memory, time and volumes of the N-th fastest grid")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write what is shown, and more digits")
    add("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    add("--timeline", type=Path, metavar="FILE.json",
        help="write the fastest's simulated step as a Chrome trace, and FILE.png "
        "beside it")  # fmt: skip
    add("--write-config", type=Path, metavar="FILE.toml",
        help="write the fastest as a configuration of axonn-ext train")  # fmt: skip
    either = group.add_mutually_exclusive_group().add_argument
    either("--weak", type=_range, metavar="A..B",
           help="instead of --gpus: A, 2 A, 4 A, ... B; the batch is for A, and grows with the "
           "GPUs")  # fmt: skip
    either("--strong", type=_range, metavar="A..B", help="the same with one batch")


def _policy(text: str) -> str:
    if not is_policy(text):
        raise argparse.ArgumentTypeError(f"expected {EXPECTED}, got {text!r}")
    return text


def _overlap(text: str) -> str | Overlap:
    """Returns "on", "off", or what numbers are given; the others are the trainer's defaults."""
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


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,12})\.\.([0-9]{1,12})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"expected A..B with 1 <= A <= B, as 512..32768, got {text!r}"
        )
    low, high = int(match[1]), int(match[2])
    last = plan_scaling.doubles(low, high)[-1]
    if last != high:
        nearest = min(2 * last, last, key=lambda n: abs(n - high))
        raise argparse.ArgumentTypeError(
            f"expected A..B with B one of A, 2 A, 4 A, ..., such as {low}..{nearest}, got {text!r}"
        )
    return low, high


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    refuse_extra("plan", extra)
    _check(args)
    console = Console()
    began = time.perf_counter()
    try:
        if args.weak or args.strong:
            plan_scaling.run(console, args, make_request(args))
            return 0
        found = plan(make_request(args))
    except InputError as error:
        raise UserError(str(error)) from None
    if args.explain is not None and args.explain > len(found.configs):
        raise UserError(
            f"--explain: expected at most {len(found.configs)}, as only so many configurations "
            f"were found, got {args.explain}"
        )
    result = dataclasses.replace(found, configs=found.configs[: args.top])
    plan_report.print_plan(console, result, tokens=args.tokens, seconds=time.perf_counter() - began)
    if args.explain is not None:
        explained = found.configs[args.explain - 1]
        plan_report.print_explanation(
            console, explained, found.request.machine, number=args.explain
        )
    _write(console, args, result)
    return 0


def make_request(args: argparse.Namespace) -> Request:
    """Returns the request of the arguments; with --weak and --strong, that for the fewest GPUs.

    Raises: UserError for a request that cannot be fulfilled, which says what could be.
    """
    try:
        machine = find_machine(args.machine)
        name, model = load_model(args.model, sequence_length=args.seq)
        optimizer = load_optimizer(args.model)
    except InputError as error:
        raise UserError(str(error)) from None
    gpus = args.gpus if args.gpus is not None else (args.weak or args.strong)[0]
    fixed: dict[str, object] = {}
    if args.recompute is not None:
        fixed["recompute"] = args.recompute
    if args.overlap is not None:
        fixed["overlap"] = None if args.overlap == "off" else args.overlap
    optimizer = dataclasses.replace(
        optimizer,
        zero=optimizer.zero if args.zero is None else args.zero,
        offload=optimizer.offload if args.offload is None else args.offload,
    )
    request = Request(
        model=model,
        model_name=name,
        num_ranks=max(1, gpus),
        machine=machine,
        batch_size=_batch_size(args, model.sequence_length),
        dtype=args.dtype,
        layouts=LAYOUTS if args.layout is None else (args.layout,),
        fixed=fixed,
        micro_batches=None if args.micro_batches is None else (args.micro_batches,),
        top=max(args.top, args.explain or 1),
        memory_fraction=args.memory_fraction,
        max_pipe=args.pipe,
        pipelines=_pipelines(args.schedule),
        optimizer=optimizer,
    )
    if gpus < 1:
        raise UserError(f"--gpus: expected a whole number >= 1, got {gpus}; {_smallest(request)}")
    return request


def _pipelines(schedule: str | None) -> tuple[PipelineOptions, ...]:
    """Returns how stages may run: all ways that are tried, or the one that is asked for."""
    if schedule is None:
        return PIPELINES
    chosen = tuple(p for p in PIPELINES if p.schedule == schedule)
    return chosen or (PipelineOptions(schedule),)


def _smallest(request: Request) -> str:
    """Says how many GPUs would be enough."""
    least = smallest_that_fits(request)
    what = f"{request.model_name} with a batch of {request.batch_size:,} sequences"
    if least is None:
        return f"{what} fits no number of GPUs of {request.machine.name}"
    return f"{what} fits {plan_report.gpus(least)} of {request.machine.name}"


def _batch_size(args: argparse.Namespace, sequence_length: int) -> int:
    """Returns the number of sequences of a step."""
    if args.global_batch_tokens is None:
        return int(args.global_batch)
    sequences, rest = divmod(args.global_batch_tokens, sequence_length)
    if rest or sequences < 1:
        near = max(1, sequences) * sequence_length
        raise UserError(
            f"--global-batch-tokens: expected a multiple of the sequence length {sequence_length}, "
            f"such as {near}, got {args.global_batch_tokens}"
        )
    return int(sequences)


def _check(args: argparse.Namespace) -> None:
    """Raises UserError with all problems that the options have by themselves."""
    here = settings.launch_environment()
    if here is not None and here.world_size > 1:
        raise UserError(
            f"plan runs in one process, got {here.world_size}; start it without torchrun"
        )
    problems = []
    if args.schedule is not None and args.pipe == 1:
        problems.append("--schedule is of pipeline stages: give --pipe, how many may be tried")
    ranged = "--weak" if args.weak else "--strong" if args.strong else None
    if (args.gpus is None) == (ranged is None):
        problems.append("expected one of --gpus, --weak and --strong")
    for name in ("explain", "timeline", "write_config"):
        if ranged is not None and getattr(args, name) is not None:
            problems.append(
                f"--{name.replace('_', '-')} is of one configuration, {ranged} has many"
            )
    if problems:
        raise UserError(*problems)
    _check_files(args)


def _check_files(args: argparse.Namespace) -> None:
    for name in ("json", "timeline", "write_config"):
        check_writable(f"--{name.replace('_', '-')}", getattr(args, name))
    check_picture("--plot", args.plot)
    if args.plot is not None and not _has_matplotlib():
        raise UserError("--plot needs matplotlib (pip install matplotlib)")
    if args.timeline is not None and args.timeline.suffix != ".json":
        raise UserError(f"--timeline: expected a name ending in .json, got {args.timeline}")
    picture = args.timeline and args.timeline.with_suffix(".png")
    files = [f for f in (args.json, args.plot, args.timeline, picture, args.write_config) if f]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file} would be written twice; give each file its own name")


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _write(console: Console, args: argparse.Namespace, result: Plan) -> None:
    """Writes the files that were asked for."""
    best, written, notes = result.configs[0], [], []
    if args.json is not None:
        plan_files.write_json(args.json, plan_files.plan_as_json(result, tokens=args.tokens))
        written.append(args.json)
    if args.plot is not None:
        from axonn_ext.cli.plan_plot import plot_plan

        with writing("--plot", args.plot):
            plot_plan(result, args.plot)
        written.append(args.plot)
    if args.timeline is not None:
        written += _write_timeline(args.timeline, best, result)
        notes += [plan_files.left_out(args.timeline, best.job)]
    if args.write_config is not None:
        title = plan_report.describe(result.request)
        plan_files.write_config(args.write_config, best, title=title, model=args.model)
        written.append(args.write_config)
        if best.job.grid.pipe > 1 and result.request.machine.device != "cpu":
            notes.append(f"{args.write_config}: pipeline stages have not yet run on a GPU")
    plan_report.print_written(console, written)
    for note in filter(None, notes):
        plan_report.say(console, note)


def _write_timeline(path: Path, best: Estimate, result: Plan) -> list[Path]:
    simulate = timeline if best.job.grid.pipe == 1 else pipeline_timeline
    step = simulate(best.job, result.request.machine)
    plan_files.write_chrome_trace(path, step, best.job)
    if not _has_matplotlib():
        return [path]
    from axonn_ext.cli.plan_plot import plot_timeline

    picture = path.with_suffix(".png")
    with writing("--timeline", picture):
        plot_timeline(step, picture, title=plan_report.subject(result.request, best))
    return [path, picture]
