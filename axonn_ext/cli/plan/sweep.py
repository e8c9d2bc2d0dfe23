"""`axonn-ext plan --sweep` and `--series`: the best configuration for each of several jobs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich.progress import track

from axonn_ext.cli.plan import cells, files, report
from axonn_ext.cli.plan.budget import Budget
from axonn_ext.cli.plan.request import make_request
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.terminal.arguments import whole
from axonn_ext.terminal.console import Console, new_table, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import writing

SERIES = "series"
# The variable of each kind of sweep, and the options that must then be left out.
SWEEPS = {
    "gpus": ("number of GPUs, with the same batch", ("gpus",)),
    "weak": ("number of GPUs, with a batch in proportion (given for the first)", ("gpus",)),
    "seq": ("tokens per sequence", ("seq",)),
    "batch": ("sequences per optimizer step", ("global_batch", "global_batch_tokens")),
    SERIES: ("number of GPUs and the model, with the same batch", ("gpus", "model")),
}


class Sweep(NamedTuple):
    """kind: one of SWEEPS. values: of its variable. models: those of a series, else empty."""

    kind: str
    values: tuple[int, ...]
    models: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return f"--{SERIES}" if self.kind == SERIES else f"--sweep {self.kind}"

    def arguments(self, args: argparse.Namespace) -> list[argparse.Namespace]:
        """Returns the arguments of each job: `args` with the values of the sweep."""
        changes: list[dict[str, object]] = []
        for place, value in enumerate(self.values):
            change: dict[str, object] = {"gpus": value}
            if self.kind == "weak":
                change |= self._grown(args, value)
            elif self.kind == "seq":
                change = {"seq": value}
            elif self.kind == "batch":
                change = {"global_batch": value}
            elif self.kind == SERIES:
                change["model"] = self.models[place]
            changes.append(change)
        return [argparse.Namespace(**(vars(args) | change)) for change in changes]

    def _grown(self, args: argparse.Namespace, gpus: int) -> dict[str, object]:
        """Returns the batch for that many GPUs, in proportion to them."""
        name = "global_batch" if args.global_batch is not None else "global_batch_tokens"
        batch, rest = divmod(getattr(args, name) * gpus, self.values[0])
        if rest:
            raise UserError(
                f"--sweep weak: expected numbers of GPUs for which the batch of "
                f"{getattr(args, name):,} on {self.values[0]:,} grows to a whole one, got {gpus:,}"
            )
        return {name: batch}


def parse_sweep(text: str) -> Sweep:
    """Returns the sweep of a text like "gpus=256..4096" or "seq=2048,3072"."""
    kinds = [kind for kind in SWEEPS if kind != SERIES]
    match = re.fullmatch(rf"({'|'.join(kinds)})=([0-9.,]+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected NAME=A..B (A, 2 A, 4 A, ... B) or NAME=A,B,..., with NAME one of "
            f"{', '.join(kinds)}, got {text!r}"
        )
    low, dots, high = match[2].partition("..")
    if dots:
        return Sweep(match[1], _doubles(low, high, text))
    values = tuple(_whole(item, text) for item in match[2].split(","))
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"expected different numbers, got {text!r}")
    return Sweep(match[1], values)


def parse_series(text: str) -> Sweep:
    """Returns the series of a text like "512:gpt-5b,1024:gpt-10b"."""
    pairs = [item.partition(":") for item in text.split(",")]
    if not all(colon and model for _, colon, model in pairs):
        raise argparse.ArgumentTypeError(
            f"expected GPUS:MODEL,GPUS:MODEL,... such as 512:gpt-5b,1024:gpt-10b, got {text!r}"
        )
    numbers = tuple(_whole(gpus, text) for gpus, _, _ in pairs)
    return Sweep(SERIES, numbers, tuple(model for _, _, model in pairs))


def _whole(text: str, whole_text: str) -> int:
    try:
        return whole()(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} in {whole_text!r}") from None


def _doubles(low: str, high: str, text: str) -> tuple[int, ...]:
    """Returns low, 2 low, 4 low, ... high."""
    first, last = _whole(low, text), _whole(high, text)
    numbers = [first]
    while 2 * numbers[-1] <= last:
        numbers.append(2 * numbers[-1])
    if numbers[-1] != last:
        near = min((numbers[-1], 2 * numbers[-1]), key=lambda n: abs(n - last))
        raise argparse.ArgumentTypeError(
            f"expected A..B with B one of A, 2 A, 4 A, ..., such as {first}..{near}, got {text!r}"
        )
    return tuple(numbers)


@dataclass(frozen=True)
class Point:
    """One job of a sweep, and its best configuration; or None, and why there is none.

    value: of the sweep's variable. request: None if the job cannot even be searched.
    """

    value: int
    gpus: int
    model: str
    request: Request | None
    best: Estimate | None
    problem: str = ""


def run(console: Console, args: argparse.Namespace, sweep: Sweep) -> None:
    """Plans every job of the sweep; shows and writes the results.

    Raises: UserError if nothing fits any of them.
    """
    jobs = sweep.arguments(args)
    points = [
        _point(value, job)
        for value, job in track(
            list(zip(sweep.values, jobs, strict=True)), "planning", console=console,
            transient=True, disable=not console.is_terminal,
        )
    ]  # fmt: skip
    found = [(p, p.request) for p in points if p.best is not None and p.request is not None]
    if not found:
        raise UserError(points[-1].problem)
    first, request = found[0]
    budget = Budget(args.tokens, args.price, request.machine.watts)
    _print(console, sweep, request, points, first, budget)
    written = []
    if args.json is not None:
        files.write_json(args.json, _as_json(sweep, request, points, budget))
        written.append(args.json)
    if args.csv is not None:
        files.write_csv(args.csv, [_as_row(p, budget) for p in points])
        written.append(args.csv)
    if args.plot is not None:
        from axonn_ext.cli.plan.plot import plot_sweep

        with writing("--plot", args.plot):
            plot_sweep(
                sweep.kind, [(p.value, p.best) for p in points if p.best is not None],
                request.machine, args.plot, title=_title(sweep, request),
                subtitle=_subtitle(sweep, request),
            )  # fmt: skip
        written.append(args.plot)
    report.print_written(console, written)


def _point(value: int, args: argparse.Namespace) -> Point:
    request = None
    try:
        request = make_request(args)
        return Point(value, args.gpus, args.model, request, plan(request).configs[0])
    except PlannerError as error:
        return Point(value, args.gpus, args.model, request, None, str(error))


def _title(sweep: Sweep, request: Request) -> str:
    names = {"gpus": "Strong scaling", "weak": "Weak scaling", "seq": "Sequence lengths",
             "batch": "Batches"}  # fmt: skip
    if sweep.kind == SERIES:
        return f"Series of models on {request.machine.name}"
    return f"{names[sweep.kind]}: {request.model_name} on {request.machine.name}"


def _subtitle(sweep: Sweep, request: Request) -> str:
    """Says what changes, and what is the same for all jobs."""
    batch, sequence = request.batch_size, request.model.sequence_length
    on = cells.gpus(request.num_ranks)
    return {
        "gpus": f"the same batch of {batch:,} x {sequence:,} tokens on any number of GPUs",
        "weak": f"the batch grows with the GPUs: {batch:,} x {sequence:,} tokens on {on}",
        "seq": f"sequences of different lengths, {batch:,} x {sequence:,} tokens first, on {on}",
        "batch": f"batches of sequences of {sequence:,} tokens on {on}",
        SERIES: f"a model for each number of GPUs, with a batch of {batch:,} x {sequence:,} tokens",
    }[sweep.kind]


def efficiency(kind: str) -> Callable[[Estimate, Estimate], float]:
    """Returns a function that compares a configuration with the first of a sweep.

    It returns the ratio of tokens per second and GPU; in a series, whose models differ, the ratio
    of % of peak.
    """

    def speed(estimate: Estimate) -> float:
        if kind == SERIES:
            return estimate.peak_fraction
        return estimate.tokens_per_s / estimate.job.grid.size

    return lambda estimate, first: speed(estimate) / speed(first)


def _print(
    console: Console, sweep: Sweep, request: Request, points: list[Point], first: Point,
    budget: Budget,
) -> None:  # fmt: skip
    assert first.best is not None
    ratio = efficiency(sweep.kind)
    heads = [sweep.kind if sweep.kind in ("seq", "batch") else "GPUs"]
    heads += ["model"] if sweep.kind == SERIES else []
    heads += ["sequences", "grid", "micro-batches", "options", "step",
              cells.PEAK_TITLE, "tokens/s", "efficiency", "exposed", "memory",
              *cells.budget_heads(budget), "limit"]  # fmt: skip
    table = new_table(heads, ("model", "grid", "options", "exposed", "limit"))
    for p in points:
        row = [f"{p.value:,}", *([p.model] if sweep.kind == SERIES else [])]
        row.append("-" if p.request is None else f"{p.request.batch_size:,}")
        e = p.best
        row += ["-"] if e is None else [
            e.job.grid.short(), cells.micro_batches(e.job), cells.options(e.job),
            cells.duration(e.step_time_s), cells.peak(e),
            cells.size(e.tokens_per_s), f"{ratio(e, first.best):.1%}",
            cells.exposed(e), cells.gigabytes(e.memory.total),
            *cells.budget_cells(budget, e), e.binding,
        ]  # fmt: skip
        table.add_row(*row)
    say(console, f"{_title(sweep, request)}, {request.dtype}")
    say(console, _subtitle(sweep, request))
    say(console, "")
    print_table(console, table)
    for problem in dict.fromkeys(p.problem for p in points if p.problem):
        say(console, "")
        say(console, problem)


def _as_row(p: Point, budget: Budget) -> dict[str, object]:
    """Returns the JSON of a point."""
    request = p.request
    return {
        "gpus": p.gpus,
        "model": p.model,
        "sequence_length": request and request.model.sequence_length,
        "global_batch": request and request.batch_size,
        "config": request and p.best and files.config_as_json(p.best, request.machine, budget),
        "problem": p.problem or None,
    }


def _as_json(
    sweep: Sweep, request: Request, points: list[Point], budget: Budget
) -> dict[str, object]:
    """Returns the object that docs/interfaces.md describes; its model is that of the first job."""
    rows = [_as_row(p, budget) for p in points]
    return {**files.request_as_json(request, budget), "sweep": sweep.kind, "points": rows}
