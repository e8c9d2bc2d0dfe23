"""The plan of a run and its rows, in plain values that processes exchange as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.rules import check

SINGLE, OURS = "single", "ours"
BASELINES = (SINGLE, "ddp", "fsdp2", "tp", "tp-sp")
FIXED, STRONG, WEAK = "fixed", "strong", "weak"  # how the number of ranks is varied
SPLITS_BATCH = ("ddp", "fsdp2")
SPLITS_MATRICES = ("tp", "tp-sp")
FP32, BF16 = "fp32", "bf16"
DTYPES = (FP32, BF16)


@dataclass(frozen=True)
class SystemSpec:
    """One system that trains: a baseline, or ours on a grid, with a ZeRO stage."""

    kind: str
    grid: GridShape | None = None
    zero: int = 0

    @property
    def name(self) -> str:
        if self.grid is None:
            return self.kind
        sizes = ",".join(f"{axis}={size}" for axis, size in self.grid.as_dict().items() if size > 1)
        zero = f" zero={self.zero}" if self.zero else ""
        return f"{self.kind} {sizes or 'x=1'}{zero}"


@dataclass(frozen=True)
class Workload:
    """The training that all systems do.

    batch_size: the sequences of the global batch. clip_norm: the limit of the gradients' global
    norm. dtype: the dtype of matrix products; with bf16, each system uses its own mixed precision,
    and weights are updated in fp32.
    """

    model: ModelConfig
    batch_size: int
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # matrices only
    clip_norm: float = 1.0
    seed: int = 0
    dtype: str = FP32

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.model.sequence_length


@dataclass(frozen=True)
class Plan:
    """One launch: what is measured, and on how many ranks.

    single_threads: the threads of the only process of `single`; every other rank has one thread.
    device: "cpu", or "cuda" for one GPU per rank.
    """

    workload: Workload
    parallel: ParallelConfig
    systems: tuple[SystemSpec, ...]
    num_ranks: int
    single_threads: int
    rounds: int
    what: str = field(default="time")  # or "memory", for a plan with one system on CPUs
    device: str = "cpu"

    def problems(self) -> list[str]:
        """Returns what the ranks cannot divide evenly; empty if every system can run."""
        return [
            f"{spec.name}: {problem}"
            for spec in self.systems
            for problem in _problems(spec, self.workload, self.parallel, self.num_ranks)
        ]


def _problems(
    spec: SystemSpec, workload: Workload, parallel: ParallelConfig, num_ranks: int
) -> list[str]:
    model = workload.model
    if spec.grid is not None:
        if spec.grid.size != num_ranks:
            return [f"the grid has {spec.grid.size} ranks, expected {num_ranks}"]
        return check(model, parallel, spec.grid, batch_size=workload.batch_size)
    numbers: dict[str, int] = {}
    if spec.kind in SPLITS_BATCH:
        numbers = {"batch": workload.batch_size}
    elif spec.kind in SPLITS_MATRICES:
        numbers = {"heads": model.num_heads, "vocabulary": model.vocab_size}
        if spec.kind == "tp-sp":
            numbers["sequence"] = model.sequence_length
    return [
        f"{what} {number} must be divisible by the {num_ranks} ranks"
        for what, number in numbers.items()
        if number % num_ranks
    ]


# --- Results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """The peak memory of training on the rank where it is largest, minus that before training.

    peak_bytes: resident memory; on GPUs, torch's allocated memory. shared_bytes: the part of it in
    symmetric memory, its own or its peers', that the rank has read or written. A page that two
    ranks use counts on both. On GPUs it is 0, as that memory is outside torch's allocator.
    """

    peak_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Row:
    """One system on one number of ranks. A system with a `problem` has no time.

    loss_error, norm_error: the relative errors of the first steps, compared with `single`; None for
    values that are not numbers. spread_ms: the interquartile range of the rounds. ratio_to_single:
    tokens/s over those of `single` in the same run. memory: None if it was not measured. tflops:
    model flops of all ranks per second, in 10**12, with half of attention, since it is causal.
    peak_fraction: tflops over the GPUs' peak; None for CPUs and for GPUs whose peak is unknown.
    """

    system: str
    kind: str
    grid: dict[str, int] | None
    num_ranks: int
    num_threads: int
    batch_size: int
    loss_error: float | None
    norm_error: float | None
    problem: str | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    spread_ms: float | None = None
    rounds: int | None = None
    tokens_per_s: float | None = None
    ratio_to_single: float | None = None
    memory: MemoryUse | None = None
    dtype: str = "fp32"  # the dtype of matrix products
    device: str = "cpu"
    tflops: float | None = None
    peak_fraction: float | None = None
