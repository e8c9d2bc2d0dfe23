"""What a run of the benchmark does, in plain values that its processes get as JSON."""

from __future__ import annotations

import dataclasses
import json
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
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class SystemSpec:
    """One system that trains: a baseline, or ours on a grid, with a stage of ZeRO."""

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
    """The training that all systems do in the same way.

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
    device: "cpu", or "cuda" for a GPU of each rank's own.
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
        """Returns where the ranks do not divide the work; empty if every system can run."""
        return [
            f"{spec.name}: {problem}"
            for spec in self.systems
            for problem in _problems(spec, self.workload, self.parallel, self.num_ranks)
        ]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        workload = values.pop("workload")
        workload["model"] = ModelConfig(**workload["model"])
        workload["betas"] = tuple(workload["betas"])
        parallel = ParallelConfig(**values.pop("parallel"))
        systems = tuple(
            SystemSpec(
                spec["kind"], GridShape(**spec["grid"]) if spec["grid"] else None, spec["zero"]
            )
            for spec in values.pop("systems")
        )
        return cls(workload=Workload(**workload), parallel=parallel, systems=systems, **values)


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
