"""Compares predictions with published results: their errors, and those of a fit on other runs.

`python -m axonn_ext.planner.published docs/planner.md` fits anew: it writes the slowdown to the
files of the machines, until the fit does not change, and then the tables of the document.
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

from axonn_ext.inputs.tables import Table, read_table
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machine import Machine, load_machine
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.model_files import load_model
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.grid import AXES, GridShape, divisors
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import LAYOUTS, Overlap

_FITTED = re.compile(r"^(slowdown = )[0-9.]+( +# fitted)", re.MULTILINE)
_MOST_PARTS = 64  # the most ranks of x and y together that are tried
_SIMULATED = 60  # configurations of each x y


class BlockOverlap(NamedTuple):
    """Overlap with a budget of so many blocks beside the one in use; see published.toml."""

    prefetch: int
    deferred: int
    held_blocks: int

    def on(self, model: ModelConfig, grid: GridShape, width: int) -> Overlap:
        """Returns the options on a grid. width: the bytes of an element of a weight."""
        block = sum(w.n * w.k for w in model.block_linears) * width // (grid.x * grid.y)
        budget = (self.held_blocks + 1) * block
        return Overlap(self.prefetch, gathered_bytes=budget, deferred=self.deferred)


@dataclass(frozen=True)
class Run:
    """One published run; see published.toml.

    grid: None if it was not published. overlap: what the program does; None: nothing. reported: the
    fraction of peak, by the rule `flops`.
    """

    source: str
    machine: str
    model_name: str
    model: ModelConfig
    num_ranks: int
    batch_size: int
    grid: GridShape | None
    options: Options
    overlap: BlockOverlap | None
    powers_of_two: bool
    flops: str
    reported: float
    assumed: str


class OutOfScope(NamedTuple):
    """A published result that is not predicted."""

    name: str
    reason: str
    source: str


class Prediction(NamedTuple):
    """The prediction for a run. fraction: of the machine's peak, by the run's own rule."""

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


def load_runs() -> tuple[tuple[Run, ...], tuple[OutOfScope, ...]]:
    """Reads all of published.toml."""
    file = read_table(resources.files("axonn_ext.planner") / "published.toml")
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
    length = _first(places, "sequence_length").count("sequence_length")
    model = _read_model(models.table(name), length) if models.has(name) else None
    options = Options(
        layout=_first(places, "layout").one_of("layout", LAYOUTS),
        recompute=_first(places, "recompute").text("recompute"),
        overlap=None,
        micro_batches=row.count("micro_batches", 1),
    )
    assumed = "; ".join(place.text("assumed") for place in places if place.has("assumed"))
    run = Run(
        source=source.text("name"),
        machine=row.text("machine"),
        model_name=name,
        model=model or load_model(name, sequence_length=length)[1],
        num_ranks=row.count("num_ranks"),
        batch_size=row.count("batch_size"),
        grid=_read_grid(row.table("grid")) if row.has("grid") else None,
        options=options,
        overlap=_read_overlap(_first(places, "overlap")),
        powers_of_two=source.flag("powers_of_two", False),
        flops=source.one_of("flops", tuple(FLOPS)),
        reported=row.positive("reported", most=1),
        assumed=assumed,
    )
    row.finish()
    return run


def _first(places: Sequence[Table], key: str) -> Table:
    return next((place for place in places if place.has(key)), places[0])


def _read_model(table: Table, sequence_length: int) -> ModelConfig:
    model = ModelConfig(
        vocab_size=table.count("vocab_size"),
        hidden_size=table.count("hidden_size"),
        num_layers=table.count("num_layers"),
        num_heads=table.count("num_heads"),
        sequence_length=sequence_length,
    )
    table.finish()
    return model


def _read_overlap(place: Table) -> BlockOverlap | None:
    if not place.has("overlap"):
        return None
    table = place.table("overlap")
    overlap = BlockOverlap(
        *(table.count(key, least=0) for key in ("prefetch", "deferred", "held_blocks"))
    )
    table.finish()
    return overlap


def _read_grid(table: Table) -> GridShape:
    return GridShape(**{axis: table.count(axis, 1) for axis in AXES})


# --- Predictions ---------------------------------------------------------------------------------


def predict(run: Run, machine: Machine) -> Prediction:
    """Predicts a run by simulating its step, on the planner's best grid if none was published."""
    best = _best(run, machine) if run.grid is None else _estimate(run, run.grid, machine)
    peak = machine.peak_flops[run.options.dtype] * run.num_ranks
    flops = FLOPS[run.flops](run.model, run.batch_size)
    return Prediction(run, best.job.grid, flops / best.step_time_s / peak)


def _estimate(run: Run, grid: GridShape, machine: Machine) -> Estimate:
    overlap = run.overlap and run.overlap.on(run.model, grid, run.options.width)
    job = Job(run.model, grid, replace(run.options, overlap=overlap), run.batch_size)
    return estimate(job, machine, memory_of(job, device=machine.device))


def _best(run: Run, machine: Machine) -> Estimate:
    """Returns the planner's best configuration.

    The budget of gathered weights depends on x y, so the search is repeated for each.
    """
    options = run.options
    best: Estimate | None = None
    for parts in divisors(run.num_ranks):
        if parts > _MOST_PARTS or (run.powers_of_two and parts & (parts - 1)):
            continue
        overlap = run.overlap and run.overlap.on(run.model, GridShape(x=parts), options.width)
        request = Request(
            run.model, run.model_name, num_ranks=run.num_ranks, machine=machine,
            batch_size=run.batch_size, dtype=options.dtype, layouts=(options.layout,),
            fixed={"recompute": options.recompute, "overlap": overlap},
            micro_batches=(options.micro_batches,), top=_SIMULATED, simulate=_SIMULATED,
        )  # fmt: skip
        try:
            found = plan(request).configs
        except PlannerError:  # nothing fits beside so many gathered weights
            continue
        for e in found:
            grid = e.job.grid
            legal = not run.powers_of_two or all(
                size & (size - 1) == 0 for size in (grid.x, grid.y, grid.z)
            )
            if (
                grid.x * grid.y == parts
                and legal
                and (best is None or e.step_time_s < best.step_time_s)
            ):
                best = e
    if best is None:
        raise PlannerError(f"{run.model_name} on {run.num_ranks} ranks: no grid fits")
    return best


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


def mean_error(predictions: Sequence[Prediction]) -> float:
    """Returns the mean of the absolute relative errors."""
    return math.fsum(abs(p.error) for p in predictions) / len(predictions)


# --- The tables of docs/planner.md ---------------------------------------------------------------

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
        _table(heads, rows),
        _table(("mean absolute error", ""), means),
        _table(("not predicted", "because", "source"), skipped),
    )
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def between_marks(document: str, tables: str) -> str:
    """Returns the document with these tables between its marks."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document must have one {BEGIN!r} and one {END!r}")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


def write_slowdown(folder: Path, slowdown: float) -> None:
    """Writes the slowdown to those machines' files in the folder whose slowdown is fitted."""
    for file in folder.glob("*.toml"):
        file.write_text(_FITTED.sub(rf"\g<1>{slowdown:.2f}\g<2>", file.read_text()))


def refit(machines: Path, rounds: int = 5) -> Comparison:
    """Returns the comparison with machines whose slowdown, which it writes, is the fitted one.

    Where the source has no grid, the planner's choice depends on the slowdown. Raises RuntimeError
    if so many rounds change it each time.
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
    comparison = refit(Path(__file__).parent / "machines")
    path.write_text(between_marks(path.read_text(), render(comparison, load_runs()[1])))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
