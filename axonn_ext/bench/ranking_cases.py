"""The models that `axonn-ext bench ranking` trains on every grid. A step takes about a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from axonn_ext.planner import Job, Machine, Options
from axonn_ext.planner.estimate import simulate_step
from axonn_ext.planner.job import violations
from axonn_ext.spec.grid import GridShape, divisors, grids_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import LAYOUTS, Overlap, ParallelConfig
from axonn_ext.spec.pipeline_options import PipelineOptions

_DTYPE = "fp32"


@dataclass(frozen=True)
class Case:
    """A model, and the sequences of its global batch."""

    model: ModelConfig
    batch_size: int


DEEP = "gpt-deep"  # the model for pipelines

# A GPT with few tokens, where weights dominate; a GPT with many tokens, where activations dominate;
# a Llama in between; a GPT with blocks for four stages, and enough tokens for micro-batches.
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpt": Case(ModelConfig(512, 128, 2, 8, 32), 8),
        "gpt-tokens": Case(ModelConfig(256, 64, 2, 8, 64), 32),
        "llama": Case(
            ModelConfig(512, 128, 2, 8, 64, family="llama", num_kv_heads=4, tie_embeddings=False), 8
        ),
        DEEP: Case(ModelConfig(512, 256, 4, 8, 128), 32),
    }
)


@dataclass(frozen=True)
class Config:
    """A grid, and how the model is trained on it.

    layout: `sharded` where that is legal. pipeline, micro_batches: how its stages run; without
    stages, the batch is not split. overlaps: with Overlap's defaults, and "auto" in the Linears.
    """

    grid: GridShape
    layout: str
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    micro_batches: int = 1
    overlaps: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        """The options: without overlap "sequential", so that each collective is waited for."""
        return ParallelConfig(
            layout=self.layout, algorithm="auto" if self.overlaps else "sequential"
        )

    @property
    def overlap(self) -> Overlap | None:
        return Overlap() if self.overlaps else None

    @property
    def schedule(self) -> str:
        """How its stages run, and whether collectives overlap, in words; "-" if neither."""
        parts = ["overlap"] * self.overlaps
        if self.grid.pipe > 1:
            parts = [self.pipeline.schedule, f"{self.micro_batches} micro-batches", *parts]
        return ", ".join(parts) or "-"


@dataclass(frozen=True)
class Launch:
    """The configurations that the ranks of one launch time."""

    case: Case
    configs: tuple[Config, ...]
    rounds: int


class Times(NamedTuple):
    """The least and median times of a step over the rounds, and their interquartile range.

    The least time counts, because other programs can only add to a time.
    """

    fastest_s: float
    median_s: float
    spread_s: float


@dataclass(frozen=True)
class Pipelines:
    """The pipelines to compare: the most stages, how they run, and the most micro-batches."""

    max_pipe: int = 1
    options: PipelineOptions = field(default_factory=PipelineOptions)
    micro_batches: int = 8


def legal_configs(
    case: Case, num_ranks: int, pipelines: Pipelines = Pipelines(), *, overlaps: bool = False
) -> tuple[Config, ...]:
    """Returns every grid of that many ranks on which the model can be trained, each once.

    With stages, a step has as many micro-batches as the grid can take, up to the requested number.
    """
    configs = []
    for pipe in divisors(num_ranks):
        if pipe > pipelines.max_pipe:
            break
        most = 1 if pipe == 1 else pipelines.micro_batches
        for grid in grids_of(num_ranks, pipe=pipe):
            ways = (
                Config(grid, layout, pipelines.options, parts, overlaps)
                for layout in LAYOUTS
                for parts in range(most, 0, -1)
            )
            configs += [way for way in ways if not any(violations(_job(case, way)))][:1]
    return tuple(configs)


def default_models(pipelines: Pipelines) -> tuple[str, ...]:
    """Returns the names of the models to train by default.

    With stages, it is the model with enough blocks, which without stages would take long on slow
    links.
    """
    if pipelines.max_pipe > 1:
        return (DEEP,)
    return tuple(name for name in CASES if name != DEEP)


def predict(case: Case, config: Config, machine: Machine) -> float:
    """Returns the seconds of a step that the planner predicts."""
    return simulate_step(_job(case, config), machine).step_time_s


def _job(case: Case, config: Config) -> Job:
    options = Options(
        layout=config.layout, overlap=config.overlap, dtype=_DTYPE, pipeline=config.pipeline,
        micro_batches=config.micro_batches, algorithm=config.parallel.algorithm,
    )  # fmt: skip
    return Job(case.model, config.grid, options, case.batch_size)
