"""Published studies as data: models, options, machines and the reported figures.

A study is a file of planner/published/studies; docs/published.md explains its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

from axonn_ext.planner.machines.machine import Machine, load_machine
from axonn_ext.planner.published.cases import (
    Case,
    find_model,
    first_with,
    read_grid,
    read_options,
    read_overlap,
)
from axonn_ext.planner.published.runs import FLOPS, Run, load_runs, read_published
from axonn_ext.spec.files.errors import unknown
from axonn_ext.spec.files.tables import Table, read_table
from axonn_ext.spec.grid import AXES

# share_of_peak          operations of a step, by the study's rule, over peak times seconds
# tflops_per_gpu         the same operations, in 1e12 per second and GPU
# tokens_per_s_per_gpu   tokens of a step, per second and GPU
# efficiency             share of peak relative to the machine's first row
# faster                 seconds of a framework's step over those of this one, minus 1
KINDS = ("share_of_peak", "tflops_per_gpu", "tokens_per_s_per_gpu", "efficiency", "faster")


@dataclass(frozen=True)
class Figure:
    """A quantity of a step that is compared, and its reported value.

    kind: one of KINDS. flops: the rule by which the source counts operations, a key of FLOPS.
    reported: the two ends of a range, which are equal for one number; None: nothing was reported.
    than: the framework of "faster". note: a remark for the reader. apart: whether the source used
    something that the planner does not have, so that the mean error excludes the figure.
    """

    kind: str
    flops: str
    reported: tuple[float, float] | None = None
    than: str = ""
    note: str = ""
    apart: bool = False


@dataclass(frozen=True)
class Way:
    """How a framework runs.

    axes: (axis, the most ranks along it) of each axis that its grids have; empty: any grid of x, y,
    z and data. sequences: the numbers of sequences to try per micro-batch and (data, z) group;
    empty: the number of micro-batches is given.
    """

    name: str
    axes: tuple[tuple[str, int], ...] = ()
    sequences: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """One step of a study, with at least one figure.

    frameworks: key -> the same step as another framework runs it.
    """

    case: Case
    way: Way
    figures: tuple[Figure, ...]
    assumed: str
    frameworks: Mapping[str, tuple[Case, Way]]


@dataclass(frozen=True)
class Study:
    """A published study.

    says: what the source reports. assumed: inputs that it does not state. lacks: its features that
    the planner does not have. most_stages: the most pipeline stages of the planner's own proposals.
    series: the rows of each machine are a curve over the number of GPUs. machines: by name.
    frameworks: the names of other frameworks, by key.
    """

    name: str
    title: str
    source: str
    says: str
    assumed: tuple[str, ...]
    lacks: tuple[str, ...]
    rows: tuple[Row, ...]
    machines: Mapping[str, Machine]
    frameworks: Mapping[str, str]
    most_stages: int
    series: bool


def study_names() -> list[str]:
    """Returns the names of the studies that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir())


def load_study(name: str) -> Study:
    """Returns the study of that name. Raises InputError for an unknown one."""
    if name not in study_names():
        raise unknown("study", name, study_names())
    return read_study(_folder() / f"{name}.toml", name)


def _folder() -> Traversable:
    return resources.files("axonn_ext.planner.published") / "studies"


def read_study(path: Traversable, name: str) -> Study:
    """Reads a study's file. Raises InputError naming file and key for a mistake."""
    file = read_table(path)
    rows, series = [*_published_rows(file), *_own_rows(file)], file.flag("series", False)
    changed = file.table("machines") if file.has("machines") else None
    names = list(dict.fromkeys(row.case.machine for row in rows))
    if series:
        rows.sort(key=lambda row: (names.index(row.case.machine), row.case.num_ranks))
    study = Study(
        name=name,
        title=file.text("title"),
        source=" ".join(file.text("source").split()),
        says=" ".join(file.text("says").split()),
        assumed=_texts(file, "assumed"),
        lacks=_texts(file, "lacks"),
        rows=tuple(rows),
        machines=MappingProxyType({machine: _machine(machine, changed) for machine in names}),
        frameworks={key: way.name for row in rows for key, (_, way) in row.frameworks.items()},
        most_stages=file.count("most_stages"),
        series=series,
    )
    file.finish()
    return study


def _texts(file: Table, key: str) -> tuple[str, ...]:
    texts = file.list(key)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise file.error(key, "an array of texts, at least one")
    return tuple(texts)


def _machine(name: str, changed: Table | None) -> Machine:
    """Returns a known machine, or one like it with other memory."""
    if changed is None or not changed.has(name):
        return load_machine(name)
    table = changed.table(name)
    base, rate = load_machine(table.text("base")), table.positive("memory_bytes_per_s")
    machine = replace(
        base, name=name, memory_bytes=table.count("memory_bytes"), memory_bytes_per_s=rate,
        products=replace(base.products, memory_bytes_per_s=rate),
    )  # fmt: skip
    table.finish()
    return machine


# --- Rows ----------------------------------------------------------------------------------------


def _published_rows(file: Table) -> list[Row]:
    """Returns the study's rows from runs.toml: the runs of the sources that it names."""
    names = [source.text("name") for source in _compared(file)]
    return [_published_row(run) for run in load_runs()[0] if run.source in names]


def _compared(file: Table) -> list[Table]:
    """Returns the sources of runs.toml that the study names."""
    keys, sources = file.list("compared"), read_published().table("sources")
    if not all(isinstance(key, str) and sources.has(key) for key in keys):
        raise file.error("compared", "an array of sources of runs.toml")
    return [sources.table(key) for key in keys]


def _published_row(run: Run) -> Row:
    case = Case(**{field.name: getattr(run, field.name) for field in fields(Case)})
    figure = Figure("share_of_peak", run.flops, (run.reported, run.reported))
    return Row(case, Way(run.source), (figure,), run.assumed, {})


def _own_rows(file: Table) -> list[Row]:
    theirs, flops = file.table("theirs"), file.one_of("flops", tuple(FLOPS))
    places = (theirs, *_compared(file))
    models, frameworks = (_table_of(file, key) for key in ("models", "frameworks"))
    known: dict[str, Table] = {}
    way, rows = _read_way(theirs), []
    for row in file.tables("rows"):
        case = _read_case((row, *places), models)
        given = tuple(_read_figure(figure, flops) for figure in row.tables("figures"))
        figures = given or (Figure("share_of_peak", flops),)
        wanted = dict.fromkeys(figure.than for figure in figures if figure.than)
        known |= {key: frameworks.table(key) for key in wanted if key not in known}
        others = {key: (_as_framework(case, known[key]), _read_way(known[key])) for key in wanted}
        rows.append(Row(case, way, figures, row.text("assumed", ""), MappingProxyType(others)))
        row.finish()
    for table in (theirs, *known.values()):
        table.finish()
    return rows


def _table_of(file: Table, key: str) -> Table:
    """Returns a table of the file; an empty one if it is missing."""
    return file.table(key) if file.has(key) else Table({}, key, file.file)


def _read_case(places: Sequence[Table], models: Table) -> Case:
    """Reads one step: its row is the first place; keys that it lacks come from the next ones."""
    row = places[0]
    name = row.text("model")
    length = first_with("sequence_length", places).count("sequence_length")
    case = Case(
        machine=first_with("machine", places).text("machine"),
        model_name=name,
        model=find_model(name, models, length),
        num_ranks=row.count("num_ranks"),
        batch_size=first_with("batch_size", places).count("batch_size"),
        grid=read_grid(row.table("grid")) if row.has("grid") else None,
        options=read_options(places),
        overlap=read_overlap(places),
        powers_of_two=first_with("powers_of_two", places).flag("powers_of_two", False),
    )
    if case.grid is not None and case.grid.size != case.num_ranks:
        raise row.error("grid", f"a grid of num_ranks={case.num_ranks} ranks")
    return case


def _as_framework(case: Case, framework: Table) -> Case:
    """Returns the same step with the options of another framework, whose grid is not known."""
    return replace(
        case, grid=None, options=read_options((framework,)), overlap=read_overlap((framework,)),
        powers_of_two=False,
    )  # fmt: skip


def _read_way(table: Table) -> Way:
    axes = table.table("axes").numbers(AXES) if table.has("axes") else {}
    sequences = table.list("sequences")
    if not all(isinstance(count, int) and count >= 1 for count in sequences):
        raise table.error("sequences", "an array of whole numbers >= 1")
    most = tuple((axis, int(ranks)) for axis, ranks in axes.items())
    return Way(table.text("name"), most, tuple(sequences))


def _read_figure(table: Table, flops: str) -> Figure:
    kind, low = table.one_of("kind", KINDS), table.positive("value")
    reported = (low, table.at_least("to", low, low))
    than = table.text("than") if kind == "faster" else ""
    note, apart = table.text("note", ""), table.flag("apart", False)
    figure = Figure(kind, flops, reported, than, note, apart)
    table.finish()
    return figure
