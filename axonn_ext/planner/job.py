"""What is planned: a model on a grid, with the options of its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import Overlap, ParallelConfig, check_choice
from axonn_ext.spec.rules import BrokenRule, broken_rules

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element


@dataclass(frozen=True)
class Options(ParallelConfig):
    """The trainer's [parallel] and [overlap] tables, and what of [train] changes time or memory.

    overlap: None where the ops themselves move weights and gradients, and nothing runs beside them.
    micro_batches: parts that a step is computed in. dtype: of parameters and activations.
    offload: optimizer state in host memory; has its place, and is False until that exists.
    """

    overlap: Overlap | None = field(default_factory=Overlap)
    micro_batches: int = 1
    dtype: str = "bf16"
    offload: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dtype", self.dtype, tuple(WIDTHS))
        if self.offload:
            raise ValueError("offload is not available yet")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be >= 1, got {self.micro_batches}")

    @property
    def width(self) -> int:
        """Bytes of an element of a parameter or activation."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True)
class Job:
    """A model on a grid. batch_size: sequences of one optimizer step, over all ranks."""

    model: ModelConfig
    grid: GridShape
    options: Options
    batch_size: int

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch over all ranks."""
        return self.batch_size // self.options.micro_batches

    @property
    def rows(self) -> int:
        """Tokens m of a micro-batch in one (data, z) group."""
        grid = self.grid
        return self.micro_batch_size * self.model.sequence_length // (grid.data * grid.z)


def violations(job: Job) -> Iterator[BrokenRule | str]:
    """Every divisibility rule that is violated; nothing if the job is legal."""
    options = job.options
    if job.batch_size % options.micro_batches:
        yield (
            f"batch: {job.batch_size} sequences must be divisible by "
            f"micro_batches={options.micro_batches}"
        )
        return
    yield from broken_rules(job.model, options, job.grid, job.micro_batch_size)
