"""`axonn-ext plan --weak` and `--strong`: the best configuration for each number of GPUs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import track

from axonn_ext.cli import plan_files, plan_report
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.terminal.console import plain_table, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import writing


@dataclass(frozen=True)
class Point:
    """The best configuration for one number of GPUs; or None, and why there is none."""

    num_ranks: int
    batch_size: int
    best: Estimate | None
    problem: str = ""


def run(console: Console, args: argparse.Namespace, request: Request) -> None:
    """Plans for the smallest number of GPUs and its doubles; shows and writes the results.

    Raises: UserError if nothing fits any of them.
    """
    kind, (low, high) = ("weak", args.weak) if args.weak else ("strong", args.strong)
    numbers = doubles(low, high)
    points = [
        point(request, num_ranks, weak=kind == "weak")
        for num_ranks in track(
            numbers, "planning", console=console, transient=True, disable=not console.is_terminal
        )
    ]
    if not any(p.best for p in points):
        raise UserError(points[-1].problem)
    _print(console, kind, request, points)
    written = []
    if args.json is not None:
        plan_files.write_json(args.json, _as_json(kind, request, points, tokens=args.tokens))
        written.append(args.json)
    if args.plot is not None:
        from axonn_ext.cli.plan_plot import plot_scaling

        with writing("--plot", args.plot):
            plot_scaling(
                [(p.num_ranks, p.best) for p in points if p.best is not None], args.plot,
                title=title(kind, request), subtitle=subtitle(kind, request, low),
            )  # fmt: skip
        written.append(args.plot)
    plan_report.print_written(console, written)


def doubles(low: int, high: int) -> list[int]:
    """Returns low, 2 low, 4 low, ... up to high."""
    numbers = [low]
    while 2 * numbers[-1] <= high:
        numbers.append(2 * numbers[-1])
    return numbers


def point(request: Request, num_ranks: int, *, weak: bool) -> Point:
    """Returns the best configuration on that many GPUs.

    weak: the batch grows with the number of GPUs.
    """
    growth = num_ranks // request.num_ranks if weak else 1
    batch_size = request.batch_size * growth
    try:
        result = plan(replace(request, num_ranks=num_ranks, batch_size=batch_size, top=1))
    except PlannerError as error:
        return Point(num_ranks, batch_size, None, str(error))
    return Point(num_ranks, batch_size, result.configs[0])


def title(kind: str, request: Request) -> str:
    return f"{kind.capitalize()} scaling: {request.model_name} on {request.machine.name}"


def subtitle(kind: str, request: Request, low: int) -> str:
    """Says how the batch depends on the number of GPUs."""
    batch, sequence = request.batch_size, request.model.sequence_length
    if kind == "strong":
        return f"the same batch of {batch:,} x {sequence:,} tokens on any number of GPUs"
    return (
        f"the batch grows with the GPUs: {batch:,} x {sequence:,} tokens on {plan_report.gpus(low)}"
    )


def efficiency(p: Point, first: Point) -> float:
    """Returns the tokens per second and GPU over those of the fewest GPUs."""
    assert p.best is not None and first.best is not None
    return (p.best.tokens_per_s / p.num_ranks) / (first.best.tokens_per_s / first.num_ranks)


def _print(console: Console, kind: str, request: Request, points: list[Point]) -> None:
    first = next(p for p in points if p.best)
    table = plain_table(padding=(0, 2, 0, 0))
    left = {"grid", "options", "exposed", "limit"}
    for name in (
        "GPUs", "batch", "grid", "micro-batches", "options", "step",
        plan_report.PEAK_TITLE, "tokens/s", "efficiency", "exposed", "memory", "limit",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    problems = []
    for p in points:
        if p.best is None:
            table.add_row(f"{p.num_ranks:,}", f"{p.batch_size:,}", "-")
            problems.append(p.problem)
            continue
        e = p.best
        table.add_row(
            f"{p.num_ranks:,}", f"{p.batch_size:,}", e.job.grid.short(),
            plan_report.micro_batches(e.job), plan_report.options(e.job),
            plan_report.duration(e.step_time_s), plan_report.peak(e),
            plan_report.size(e.tokens_per_s), f"{efficiency(p, first):.1%}", plan_report.exposed(e),
            plan_report.gigabytes(e.memory.total), e.binding,
        )  # fmt: skip
    say(console, f"{title(kind, request)}, {request.dtype}")
    say(console, subtitle(kind, request, points[0].num_ranks))
    say(console, "")
    print_table(console, table)
    for problem in problems:
        say(console, "")
        say(console, problem)


def _as_json(
    kind: str, request: Request, points: list[Point], *, tokens: float
) -> dict[str, object]:
    """Returns the object that docs/interfaces.md describes."""
    rows = [
        {
            "gpus": p.num_ranks,
            "global_batch": p.batch_size,
            "config": p.best and plan_files.config_as_json(p.best, request.machine, tokens=tokens),
            "problem": p.problem or None,
        }
        for p in points
    ]
    return {**plan_files.request_as_json(request, tokens=tokens), "scaling": kind, "points": rows}
