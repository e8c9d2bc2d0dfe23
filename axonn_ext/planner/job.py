"""A job for the planner: a model on a grid, with the options of its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from axonn_ext.planner.search.padded_vocabulary import padded_model
from axonn_ext.spec.files.keys import key
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap, ParallelConfig
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.rules import BrokenRule, broken_rules

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}  # dtype -> bytes of an element
ZERO_2_IN_STAGES = "zero=2 with pipeline stages"  # a rule that is not about divisibility


@dataclass(frozen=True)
class Options(ParallelConfig):
    """The trainer's tables [parallel] and [overlap], and the keys of [train] that matter here.

    overlap: None if the ops themselves gather weights and sum gradients, without overlap.
    pipeline: how stages run; matters only on grids with pipe > 1.
    optimizer: where AdamW's state lives, and which of it is sharded over the data axis.
    """

    overlap: Overlap | None = field(default_factory=Overlap)
    micro_batches: int = key(1, "micro-batches per step (gradient accumulation)", minimum=1)
    dtype: str = key("bf16", "dtype of weights and activations", choices=tuple(WIDTHS))
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)

    @property
    def width(self) -> int:
        """The bytes of an element of a parameter or activation."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True)
class Job:
    """A model on a grid. batch_size: the sequences of one optimizer step over all ranks.

    model: with its own vocabulary, before a grid pads it.
    """

    model: ModelConfig
    grid: GridShape
    options: Options
    batch_size: int

    @property
    def placed_model(self) -> ModelConfig:
        """The model with its vocabulary padded for the grid."""
        return padded_model(self.model, self.grid)

    @property
    def micro_batch_size(self) -> int:
        """The sequences of a micro-batch over all ranks."""
        return self.batch_size // self.options.micro_batches

    @property
    def num_parts(self) -> int:
        """The number of data ranks that shard AdamW's state; 1: each has all of it."""
        return self.options.optimizer.num_parts(self.grid.data)

    @property
    def updates_in_buckets(self) -> bool:
        """Whether AdamW updates bucket by bucket (axonn_ext.optim.bucketed), not all at once."""
        return self.num_parts > 1 or self.options.optimizer.offload != "none"

    @property
    def rows(self) -> int:
        """The tokens m of a micro-batch in one (data, z) group."""
        grid = self.grid
        return self.micro_batch_size * self.model.sequence_length // (grid.data * grid.z)


def violations(job: Job) -> Iterator[BrokenRule | str]:
    """Yields every rule that the job breaks; nothing if it is legal."""
    options = job.options
    if job.batch_size % options.micro_batches:
        yield (
            f"batch: {job.batch_size} sequences must be divisible by "
            f"micro_batches={options.micro_batches}"
        )
        return
    if job.grid.pipe > 1:
        yield from pipeline_violations(job)
    # The exchange between ranks that share a key-value head is not modelled yet.
    yield from broken_rules(job.model, options, job.grid, job.micro_batch_size, shared_heads=False)


def pipeline_violations(job: Job) -> Iterator[str]:
    """Yields the pipeline rules that a job with pipe > 1 breaks."""
    pipe, chunks, parts = job.grid.pipe, job.options.pipeline.chunks, job.options.micro_batches
    layers = job.model.num_layers
    if job.options.optimizer.zero > 1:
        yield f"{ZERO_2_IN_STAGES}: stages need zero 0 or 1, got zero=2 and pipe={pipe}"
    if layers < pipe * chunks:
        yield f"layers: {layers} blocks cannot be split into pipe={pipe} * chunks={chunks} parts"
    if chunks > 1 and parts % pipe:
        yield f"micro-batches of interleaved stages: {parts} must be divisible by pipe={pipe}"
