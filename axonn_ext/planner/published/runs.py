"""Compares predictions with published results: their errors, and those of a fit on other runs.

`python -m axonn_ext.planner.published.runs docs/planner_fit.md` refits: it writes the slowdown to
the machines' files until the fit no longer changes, and then the tables of the document.
"""

from __future__ import annotations

import bisect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from axonn_ext.planner.machines.machine import Machine, load_machine
from axonn_ext.planner.published.cases import (
    Case,
    estimate_case,
    find_model,
    first_with,
    read_grid,
    read_options,
    read_overlap,
)
from axonn_ext.spec.files.tables import Table, read_table
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig

_FITTED = re.compile(r"^(slowdown = )[0-9.]+( +# fitted)", re.MULTILINE)


@dataclass(frozen=True)
class Run(Case):
    """One published run; see runs.toml.

    reported: the fraction of peak, with operations counted by the rule `flops`.
    """

    source: str
    flops: str
    reported: float
    assumed: str


class OutOfScope(NamedTuple):
    """A published result that is not predicted."""

    name: str
    reason: str
    source: str


class Prediction(NamedTuple):
    """The prediction for a run. fraction: of the machine's peak, by the run's rule `flops`."""

    run: Run
    grid: GridShape
    fraction: float

    @property
    def error(self) -> float:
        """The error relative to the reported fraction."""
        return self.fraction / self.run.reported - 1


# --- Operations of a step, as the sources count them ---------------------------------------------


def _recomputed(model: ModelConfig, batch_size: int) -> float:
    b, s, layers, h = batch_size, model.sequence_length, model.num_layers, model.hidden_size
    return 96 * b * s * layers * h**2 * (1 + s / (6 * h) + model.vocab_size / (16 * layers * h))


def _palm(model: ModelConfig, batch_size: int) -> float:
    return _palm_of(model, batch_size, model.num_parameters())


def _palm_embedding(model: ModelConfig, batch_size: int) -> float:
    embedding = model.vocab_size * model.hidden_size
    return _palm_of(model, batch_size, model.num_parameters() - embedding)


def _palm_of(model: ModelConfig, batch_size: int, num_parameters: int) -> float:
    s = model.sequence_length
    attention = 12 * model.num_layers * model.hidden_size * s
    return batch_size * s * (6 * num_parameters + attention)


FLOPS: Mapping[str, Callable[[ModelConfig, int], float]] = {
    "recomputed": _recomputed,
    "palm": _palm,
    "palm_embedding": _palm_embedding,
}


# --- The file ------------------------------------------------------------------------------------


def read_published() -> Table:
    """Returns the file of published runs."""
    return read_table(resources.files("axonn_ext.planner.published") / "runs.toml")


def load_runs() -> tuple[tuple[Run, ...], tuple[OutOfScope, ...]]:
    """Reads all of runs.toml."""
    file = read_published()
    models, sources = file.table("models"), file.table("sources")
    runs = tuple(_read_run(row, models, sources) for row in file.tables("runs"))
    skipped = tuple(
        OutOfScope(row.text("name"), row.text("reason"), row.text("source"))
        for row in file.tables("out_of_scope")
    )
    return runs, skipped


def _read_run(row: Table, models: Table, sources: Table) -> Run:
    """Reads a run. Keys that the row does not have come from its source."""
    source = sources.table(row.text("source"))
    name = row.text("model")
    places = (row, source)
    length = first_with("sequence_length", places).count("sequence_length")
    assumed = "; ".join(place.text("assumed") for place in places if place.has("assumed"))
    run = Run(
        source=source.text("name"),
        machine=row.text("machine"),
        model_name=name,
        model=find_model(name, models, length),
        num_ranks=row.count("num_ranks"),
        batch_size=row.count("batch_size"),
        grid=read_grid(row.table("grid")) if row.has("grid") else None,
        options=read_options(places),
        overlap=read_overlap(places),
        powers_of_two=source.flag("powers_of_two", False),
        flops=source.one_of("flops", tuple(FLOPS)),
        reported=row.positive("reported", most=1),
        assumed=assumed,
    )
    row.finish()
    return run


# --- Predictions ---------------------------------------------------------------------------------


def predict(run: Run, machine: Machine) -> Prediction:
    """Simulates a step of the run, on the planner's best grid if none was published."""
    best = estimate_case(run, machine)
    peak = machine.peak_flops[run.options.dtype] * run.num_ranks
    flops = FLOPS[run.flops](run.model, run.batch_size)
    return Prediction(run, best.job.grid, flops / best.step_time_s / peak)


class Comparison:
    """Predictions of all runs for any slowdown of all machines (see Machine.slowdown).

    A step's time is simulated at a few slowdowns and interpolated between them.
    """

    SLOWDOWNS = (1.0, 1.2, 1.4)

    def __init__(self, runs: Sequence[Run]) -> None:
        machines = {run.machine: load_machine(run.machine) for run in runs}
        self.runs = tuple(runs)
        # Grids are those for the machines as they are, before a slowdown is tried.
        grids = [predict(run, machines[run.machine]).grid for run in runs]
        self._at = [
            [
                predict(replace(run, grid=grid), replace(machines[run.machine], slowdown=slowdown))
                for run, grid in zip(runs, grids, strict=True)
            ]
            for slowdown in self.SLOWDOWNS
        ]

    def at(self, slowdown: float) -> list[Prediction]:
        """Predicts all runs; times are linear between two simulated slowdowns, and beyond them."""
        known = self.SLOWDOWNS
        i = min(max(bisect.bisect(known, slowdown) - 1, 0), len(known) - 2)
        share = (slowdown - known[i]) / (known[i + 1] - known[i])
        return [
            low._replace(fraction=1 / ((1 - share) / low.fraction + share / high.fraction))
            for low, high in zip(self._at[i], self._at[i + 1], strict=True)
        ]

    def fit(self, used: Callable[[Run], bool] = lambda run: True) -> float:
        """Returns the slowdown that minimises the squared log errors of the used runs, to 0.01.

        It is the same for all machines.
        """

        def loss(slowdown: float) -> float:
            errors = (math.log1p(p.error) for p in self.at(slowdown) if used(p.run))
            return math.fsum(e * e for e in errors)

        return min((round(1 + i / 100, 2) for i in range(51)), key=loss)

    def held_out(self, group_of: Callable[[Run], object]) -> list[Prediction]:
        """Predicts each run with the slowdown that was fitted to all runs of other groups."""
        groups = [group_of(run) for run in self.runs]
        slowdowns = {group: self._fit_without(group, group_of) for group in dict.fromkeys(groups)}
        return [self.at(slowdowns[group])[i] for i, group in enumerate(groups)]

    def _fit_without(self, group: object, group_of: Callable[[Run], object]) -> float:
        return self.fit(lambda run: group_of(run) != group)


def held_out_error() -> float:
    """Returns the mean error of all runs, each predicted by a fit to the runs of other sources."""
    comparison = Comparison(load_runs()[0])
    return mean_error(comparison.held_out(lambda run: run.source))


def mean_error(predictions: Sequence[Prediction]) -> float:
    """Returns the mean of the absolute relative errors."""
    return math.fsum(abs(p.error) for p in predictions) / len(predictions)


# --- The tables of docs/planner_fit.md -----------------------------------------------------------

BEGIN, END = "<!-- published runs: begin -->", "<!-- published runs: end -->"


def render(comparison: Comparison, skipped: Sequence[OutOfScope]) -> str:
    """Returns Markdown with every run, the mean errors, and the runs that are out of scope."""
    slowdown = comparison.fit()
    raw, fitted = comparison.at(1.0), comparison.at(slowdown)
    by_run = comparison.held_out(lambda run: run)
    by_source = comparison.held_out(lambda run: run.source)
    rows = [
        (
            p.run.source, p.run.machine, p.run.model_name, f"{p.run.num_ranks:,}",
            p.grid.short() + ("" if run.grid else " *"), _percent(p.run.reported),
            _percent(fit.fraction), *(f"{100 * q.error:+.0f} %" for q in (p, fit, one, source)),
            p.run.assumed,
        )
        for run, p, fit, one, source in zip(
            comparison.runs, raw, fitted, by_run, by_source, strict=True
        )
    ]  # fmt: skip
    heads = (
        "source", "machine", "model", "GPUs", "grid", "reported", "predicted",
        "error at slowdown 1", "error", "run held out", "source held out", "assumed",
    )  # fmt: skip
    means = [
        ("slowdown 1: kernels at their best", _percent(mean_error(raw))),
        (f"slowdown {slowdown}, fitted to all {len(raw)} runs", _percent(mean_error(fitted))),
        ("each run by a fit to the others", _percent(mean_error(by_run))),
        ("each source by a fit to the other sources", _percent(mean_error(by_source))),
    ]
    parts = (
        markdown_table(heads, rows),
        markdown_table(("mean absolute error", ""), means),
        markdown_table(("not compared here", "because", "source"), skipped),
    )
    return "\n".join(parts)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def between_marks(document: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns the document with these tables between its marks. Raises ValueError without them."""
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document must have one {begin!r} and one {end!r}")
    before, rest = document.split(begin)
    return f"{before}{begin}\n\n{tables}\n{end}{rest.split(end)[1]}"


def write_slowdown(folder: Path, slowdown: float) -> None:
    """Writes the slowdown to the files in the folder whose slowdown is marked as fitted."""
    for file in folder.glob("*.toml"):
        file.write_text(_FITTED.sub(rf"\g<1>{slowdown:.2f}\g<2>", file.read_text()))


def refit(machines: Path, rounds: int = 5) -> Comparison:
    """Writes the fitted slowdown to the machines' files; returns the comparison with it.

    Where the source has no grid, the planner's choice depends on the slowdown. Raises RuntimeError
    if the slowdown still changes after that many rounds.
    """
    runs = load_runs()[0]
    for _ in range(rounds):
        comparison = Comparison(runs)
        slowdown = comparison.fit()
        if all(load_machine(run.machine).slowdown == slowdown for run in runs):
            return comparison
        write_slowdown(machines, slowdown)
    raise RuntimeError(f"the fit has not settled in {rounds} rounds; the last is {slowdown}")


def _main(path: Path) -> None:
    comparison = refit(Path(__file__).parents[1] / "machines")
    path.write_text(between_marks(path.read_text(), render(comparison, load_runs()[1])))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
