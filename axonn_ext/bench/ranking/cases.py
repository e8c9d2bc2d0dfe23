"""The models that are trained on every grid. A step takes about a second on a shared CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from axonn_ext.planner import Job, Machine, Options, simulate
from axonn_ext.planner.job import violations
from axonn_ext.spec.grid import GridShape, grids_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import LAYOUTS, ParallelConfig

_DTYPE = "fp32"


@dataclass(frozen=True)
class Case:
    """A model, and the sequences of its global batch."""

    model: ModelConfig
    batch_size: int


# A GPT with few tokens, where weights dominate; a GPT with many tokens, where activations dominate;
# a Llama in between.
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpt": Case(ModelConfig(512, 128, 2, 8, 32), 8),
        "gpt-tokens": Case(ModelConfig(256, 64, 2, 8, 64), 32),
        "llama": Case(
            ModelConfig(512, 128, 2, 8, 64, family="llama", num_kv_heads=4, tie_embeddings=False), 8
        ),
    }
)


@dataclass(frozen=True)
class Config:
    """A grid, and the layout in which the model is trained: `sharded` where that is legal."""

    grid: GridShape
    layout: str

    @property
    def parallel(self) -> ParallelConfig:
        """The options: "sequential", since the planner's model describes c10d's collectives."""
        return ParallelConfig(layout=self.layout, algorithm="sequential")


@dataclass(frozen=True)
class Launch:
    """What the ranks of one launch time."""

    case: Case
    configs: tuple[Config, ...]
    rounds: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Launch:
        values = json.loads(text)
        case = values["case"]
        configs = (Config(GridShape(**c["grid"]), c["layout"]) for c in values["configs"])
        model = ModelConfig(**case["model"])
        return cls(Case(model, case["batch_size"]), tuple(configs), values["rounds"])


def legal_configs(case: Case, num_ranks: int) -> tuple[Config, ...]:
    """Returns every grid of that many ranks on which the model can be trained, each once."""
    configs = []
    for grid in grids_of(num_ranks):
        layouts = [x for x in LAYOUTS if not any(violations(_job(case, Config(grid, x))))]
        configs += [Config(grid, layout) for layout in layouts[:1]]
    return tuple(configs)


def predict(case: Case, config: Config, machine: Machine) -> float:
    """Returns the seconds of a step that the planner predicts."""
    return simulate(_job(case, config), machine).step_time_s


def _job(case: Case, config: Config) -> Job:
    options = Options(layout=config.layout, overlap=None, dtype=_DTYPE)
    return Job(case.model, config.grid, options, case.batch_size)
