"""A step that somebody else's program made, and what the planner says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_ext.inputs.tables import Table
from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.job import WIDTHS, Job, Options
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.model_files import load_model
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.grid import AXES, GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OFFLOADS, ZERO_STAGES, OptimizerOptions
from axonn_ext.spec.parallel import LAYOUTS, Overlap
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.pipeline_options import PipelineOptions


@dataclass(frozen=True)
class Case:
    """A step that somebody else's program made. grid: None if it was not published."""

    machine: str
    model_name: str
    model: ModelConfig
    num_ranks: int
    batch_size: int
    grid: GridShape | None
    options: Options


def estimate_case(case: Case, machine: Machine) -> Estimate:
    """Simulates a step on its grid, or on the planner's best if none was published.

    Raises PlannerError if no grid was published and nothing fits.
    """
    options = case.options
    if case.grid is not None:
        job = Job(case.model, case.grid, options, case.batch_size)
        return estimate(job, machine, memory_of(job, device=machine.device))
    request = Request(
        case.model, case.model_name, num_ranks=case.num_ranks, machine=machine,
        batch_size=case.batch_size, dtype=options.dtype, layouts=(options.layout,),
        fixed={"recompute": options.recompute, "overlap": options.overlap},
        micro_batches=(options.micro_batches,), top=1, simulate=20, optimizer=options.optimizer,
    )  # fmt: skip
    return plan(request).configs[0]


def first_with(key: str, places: Sequence[Table]) -> Table:
    """Returns the first table that has the key; if none has it, the first one."""
    return next((place for place in places if place.has(key)), places[0])


def find_model(name: str, models: Table, sequence_length: int) -> ModelConfig:
    """Returns a model of the file's own table `models`, or else a known one."""
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
    """Returns the grid of a table of axes; those that it leaves out have one rank."""
    return GridShape(**{axis: table.count(axis, 1) for axis in AXES})


def read_options(places: Sequence[Table]) -> Options:
    """Returns the options that the first of these tables with a key says, or else the defaults."""

    def place(key: str) -> Table:
        return first_with(key, places)

    zero = place("zero").count("zero", 0, least=0)
    if zero not in ZERO_STAGES:
        raise place("zero").error("zero", f"one of {', '.join(map(str, ZERO_STAGES))}")
    chunks = place("chunks").count("chunks", 1)
    schedule = place("schedule").one_of("schedule", SCHEDULES, PipelineOptions.schedule)
    return Options(
        layout=place("layout").one_of("layout", LAYOUTS),
        recompute=place("recompute").text("recompute"),
        overlap=Overlap() if place("overlap").flag("overlap") else None,
        dtype=place("dtype").one_of("dtype", tuple(WIDTHS), Options.dtype),
        micro_batches=place("micro_batches").count("micro_batches", 1),
        optimizer=OptimizerOptions(
            zero=zero, offload=place("offload").one_of("offload", OFFLOADS, "none")
        ),
        pipeline=PipelineOptions(schedule, chunks=chunks),
    )
