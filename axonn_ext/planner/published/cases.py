"""Training steps of other programs, and the planner's predictions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.files.keys import keys_of
from axonn_ext.spec.files.tables import Table
from axonn_ext.spec.grid import AXES, GridShape, divisors
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_model
from axonn_ext.spec.optimizer import ADAMW, OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions

_MOST_PARTS = 64  # the largest product x y of axis sizes that is tried
_SIMULATED = 60  # configurations for each x y
T = TypeVar("T")


class BlockOverlap(NamedTuple):
    """Overlap with a budget of held_blocks blocks besides the one in use; see runs.toml."""

    prefetch: int
    deferred: int
    held_blocks: int

    def on(self, model: ModelConfig, grid: GridShape, width: int) -> Overlap:
        """Returns the options on a grid. width: the bytes of an element of a weight."""
        block = sum(w.n * w.k for w in model.block_linears) * width // (grid.x * grid.y)
        budget = (self.held_blocks + 1) * block
        return Overlap(self.prefetch, gathered_bytes=budget, deferred=self.deferred)


@dataclass(frozen=True)
class Case:
    """A training step of another program.

    grid: None if it was not published. overlap: the program's overlap, which `options` leaves out;
    None: it has none. powers_of_two: the program tries only such sizes of x, y and z.
    """

    machine: str
    model_name: str
    model: ModelConfig
    num_ranks: int
    batch_size: int
    grid: GridShape | None
    options: Options
    overlap: BlockOverlap | None
    powers_of_two: bool

    def on(self, grid: GridShape, options: Options | None = None) -> Job:
        """Returns the step on a grid, with its own options or other ones."""
        options = self.options if options is None else options
        overlap = self.overlap and self.overlap.on(self.model, grid, options.width)
        return Job(self.model, grid, replace(options, overlap=overlap), self.batch_size)


def estimate_case(case: Case, machine: Machine) -> Estimate:
    """Simulates a step on its grid, or on the planner's best if none was published.

    Raises PlannerError if no grid was published and nothing fits.
    """
    if case.grid is None:
        return _best(case, machine)
    job = case.on(case.grid)
    return estimate(job, machine, memory_on(job, machine))


def _best(case: Case, machine: Machine) -> Estimate:
    """Returns the planner's best configuration.

    The budget of gathered weights depends on x y, so the search is repeated for each.
    """
    options = case.options
    best: Estimate | None = None
    for parts in divisors(case.num_ranks):
        if parts > _MOST_PARTS or (case.powers_of_two and parts & (parts - 1)):
            continue
        overlap = case.overlap and case.overlap.on(case.model, GridShape(x=parts), options.width)
        request = Request(
            case.model, case.model_name, num_ranks=case.num_ranks, machine=machine,
            batch_size=case.batch_size, dtype=options.dtype, layouts=(options.layout,),
            fixed={"recompute": options.recompute, "overlap": overlap},
            micro_batches=(options.micro_batches,), top=_SIMULATED, simulate=_SIMULATED,
            optimizers=(options.optimizer,),
        )  # fmt: skip
        try:
            found = plan(request).configs
        except PlannerError:  # nothing else fits with this many gathered weights
            continue
        for e in found:
            grid = e.job.grid
            sizes = (grid.x, grid.y, grid.z) if case.powers_of_two else ()
            legal = grid.x * grid.y == parts and all(n & (n - 1) == 0 for n in sizes)
            if legal and (best is None or e.step_time_s < best.step_time_s):
                best = e
    if best is None:
        raise PlannerError(f"{case.model_name} on {case.num_ranks} ranks: no grid fits")
    return best


def first_with(key: str, places: Sequence[Table]) -> Table:
    """Returns the first table that has the key; if none has it, the first one."""
    return next((place for place in places if place.has(key)), places[0])


def find_model(name: str, models: Table, sequence_length: int) -> ModelConfig:
    """Returns a model of the file's table `models`, or else a known one."""
    if not models.has(name):
        return load_model(name, sequence_length=sequence_length)[1]
    table = models.table(name)
    model = ModelConfig(
        vocab_size=table.count("vocab_size"),
        hidden_size=table.count("hidden_size"),
        num_layers=table.count("num_layers"),
        num_heads=table.count("num_heads"),
        sequence_length=sequence_length,
    )
    table.finish()
    return model


def read_grid(table: Table) -> GridShape:
    """Returns the grid of a table of axes. Axes that are not given have size 1."""
    return GridShape(**{axis: table.count(axis, 1) for axis in AXES})


def read_options(places: Sequence[Table]) -> Options:
    """Returns the options, each from the first of these tables that has its key, or the default.

    The first table must have layout and recompute unless another one has. Overlap is read by
    `read_overlap`. The optimizer is AdamW; `name` is that of the table's own subject.
    """
    for name in ("layout", "recompute"):
        first_with(name, places).text(name)
    optimizer = _read(OptimizerOptions, places, name=ADAMW)
    pipeline = _read(PipelineOptions, places)
    return _read(Options, places, overlap=None, optimizer=optimizer, pipeline=pipeline)


def _read(kind: Callable[..., T], places: Sequence[Table], **others: Any) -> T:
    for name, key in keys_of(kind).items():
        if name in others:
            continue
        others |= first_with(name, places).read({name: key.read})
    return kind(**others)


def read_overlap(places: Sequence[Table]) -> BlockOverlap | None:
    """Returns the overlap of the first of these tables that has one; None if none has."""
    place = first_with("overlap", places)
    if not place.has("overlap"):
        return None
    table = place.table("overlap")
    overlap = BlockOverlap(
        *(table.count(key, least=0) for key in ("prefetch", "deferred", "held_blocks"))
    )
    table.finish()
    return overlap
