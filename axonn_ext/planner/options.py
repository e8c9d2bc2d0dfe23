"""How a model is run on a grid, and which of it is legal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from axonn_ext.planner.grid import GridSize
from axonn_ext.planner.model import Model

LAYOUTS = ("sharded", "replicated")
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element


@dataclass(frozen=True)
class Overlap:
    """The trainer's [overlap] table; see axonn_ext.overlap.Overlap."""

    prefetch: int = 1
    gathered_bytes: int = 1 << 30
    deferred: int = 2
    bucket_bytes: int = 32 << 20


@dataclass(frozen=True)
class Options:
    """The trainer's [parallel] and [overlap] tables, and what of [train] changes time or memory.

    overlap: None where the ops themselves move weights and gradients, and nothing runs beside them.
    micro_batches: parts that a step is computed in. dtype: of parameters and activations.
    offload: optimizer state in host memory; has its place, and is False until that exists.
    """

    layout: str = "sharded"
    heads_over_y: bool = False
    save_gathered: bool = False
    reshard_after_forward: bool = True
    recompute: bool = False
    overlap: Overlap | None = field(default_factory=Overlap)
    micro_batches: int = 1
    dtype: str = "bf16"
    offload: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("layout", LAYOUTS), ("dtype", tuple(WIDTHS))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError("heads_over_y needs layout 'sharded'")
        if self.offload:
            raise ValueError("offload is not available yet")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be >= 1, got {self.micro_batches}")

    @property
    def width(self) -> int:
        """Bytes of an element of a parameter or activation."""
        return WIDTHS[self.dtype]

    @property
    def sharded(self) -> bool:
        return self.layout == "sharded"


@dataclass(frozen=True)
class Job:
    """A model on a grid. batch_size: sequences of one optimizer step, over all ranks."""

    model: Model
    grid: GridSize
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


def violations(job: Job) -> Iterator[str]:
    """Every divisibility rule that is violated, with its numbers; nothing if the job is legal.

    The same rules as `axonn_ext.models.check` (the executable specification proves them exact);
    a test holds the two to each other.
    """
    model, grid, options = job.model, job.grid, job.options
    if job.batch_size % options.micro_batches:
        yield (
            f"batch: {job.batch_size} sequences must be divisible by "
            f"micro_batches={options.micro_batches}"
        )
        return
    batch, sharded = job.micro_batch_size, options.sharded
    tokens = batch * model.sequence_length
    over_y = sharded and not options.heads_over_y
    rules: list[tuple[str, int, tuple[str, ...]]] = [
        ("sequences of a micro-batch", batch, ("data", "z", "y") if over_y else ("data", "z")),
        ("num_kv_heads", model.kv_heads, ("x", "y") if options.heads_over_y else ("x",)),
        ("hidden_size", model.hidden_size, ("y", "z")),
        ("qkv features", model.qkv_size, ("x", "z")),
        ("intermediate_size", model.mlp_size, ("x",)),
        ("up features", model.up_size, ("x", "z")),
        ("vocab_size", model.vocab_size, ("x", "z")),
    ]
    if sharded:
        rules += [
            ("tokens of a micro-batch (residual rows)", tokens, ("data", "z", "x")),
            ("tokens of a micro-batch (MLP rows)", tokens, ("data", "z", "y")),
        ]
    for what, value, axes in rules:
        parts = math.prod(getattr(grid, axis) for axis in axes)
        if value % parts:
            sizes = " * ".join(f"{axis}={getattr(grid, axis)}" for axis in axes)
            yield f"{what}: {value} must be divisible by {parts} ({sizes})"
