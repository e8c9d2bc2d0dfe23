"""The common traits of the models of a family, and the list of all families.

A family is one word of `FAMILIES` below and the module `axonn_ext/models/<its name>`, which defines
FAMILY, a `Family` as below. It does not import torch, so that the planner can read it. If it uses
another family's modules, it is a file, such as mistral.py; else a folder, whose `__init__.py`
defines FAMILY:

    model.py   the modules for a grid, with the names of their public state
    plain.py   the same model in plain torch.nn, in the layout of Hugging Face's weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_ext.spec.model import ModelConfig

# A family's module is loaded when a model of the family is first described.
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "opt")


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows.

    num_vectors: the number of parameters, of hidden_size elements each.
    num_statistics: the numbers per row that the ranks along y combine, in fp32.
    gathers: forward all-gathers the statistics over y and combines them on each rank; otherwise it
    all-reduces them.
    """

    num_vectors: int
    num_statistics: int
    gathers: bool


LAYER_NORM = Norm(num_vectors=2, num_statistics=2, gathers=True)  # mean and variance
RMS_NORM = Norm(num_vectors=1, num_statistics=1, gathers=False)  # mean of squares


@dataclass(frozen=True)
class HuggingFace:
    """How a config.json of transformers describes a model of the family.

    model_type: the file's value for this key.
    architecture: the transformers class that has the weights.
    keys: the field of ModelConfig -> the key of config.json.
    defaults: key -> the value that transformers uses if the key is missing. None means that
        ModelConfig's default applies.
    activation_key: the key that names the activation.
    activations: the names of activations equivalent to that of the family's MLP; transformers'
        default comes first.
    must_be_false, must_be_null: the key of a feature that the family lacks -> the reason.
    must_be_true: the key of a feature that a model of the family always has here -> the reason.
        In transformers a missing key must mean this too, since config_json does not write it.
    must_equal: a key that must have the same value as another key, if present -> that other key.
    head_size: the head_dim that transformers uses if the key is missing; None: hidden_size /
        num_heads. Only families with rotary positions have the key.
    window_key: the key of the attention window, in tokens; null means that there is no window.
        sequence_length is limited to the window, because attention over such sequences is the same
        with and without it.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    activation_key: str
    activations: tuple[str, ...]
    must_be_false: Mapping[str, str] = field(default_factory=dict)
    must_be_null: Mapping[str, str] = field(default_factory=dict)
    must_be_true: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    window_key: str | None = None
    head_size: int | None = None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the contents of transformers' config.json for a model of the family."""
        values: dict[str, Any] = {"model_type": self.model_type}
        sizes = {"num_kv_heads": config.kv_heads, "intermediate_size": config.mlp_size}
        for ours, theirs in self.keys.items():
            values[theirs] = sizes[ours] if ours in sizes else getattr(config, ours)
        values |= {key: values[other] for key, other in self.must_equal.items()}
        values[self.activation_key] = self.activations[0]
        if config.traits.rotary:
            values |= {"rope_theta": config.rope_theta, "head_dim": config.head_dim}
            if config.rope_scaling is not None:
                values["rope_scaling"] = {"rope_type": "llama3"} | vars(config.rope_scaling)
        if self.window_key is not None:
            values[self.window_key] = None
        return values


@dataclass(frozen=True)
class Family:
    """The facts about a family of decoder-only transformers.

    name               the value of ModelConfig.family
    modules            the family whose folder in axonn_ext/models has the modules
    has_biases         whether the Linears of a block have biases; lm_head never has one
    has_qkv_bias       whether qkv has a bias even if the other Linears have none
    has_head_norms     whether the queries and the keys of each head are normalised
    position_offset    the row of the learned table for position 0; rows before it are unused
    activation         of the MLP: "gelu" (its tanh form), "relu", or "swiglu", where the up Linear
                       computes gate and up, and the MLP multiplies the two
    rotary             positions rotate queries and keys; otherwise a table of positions is learned
    grouped_query      whether num_kv_heads may be less than num_heads
    norm               the norm before attention, before the MLP and at the end of the model
    default_mlp_size   hidden_size -> the intermediate_size of a model that does not give one
    hugging_face       how transformers describes models of the family
    """

    name: str
    modules: str
    has_biases: bool
    activation: str
    rotary: bool
    grouped_query: bool
    norm: Norm
    default_mlp_size: Callable[[int], int]
    hugging_face: HuggingFace
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    position_offset: int = 0

    @property
    def gated(self) -> bool:
        """Whether the up Linear computes gate and up."""
        return self.activation == "swiglu"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the name, by which another process finds the family."""
        return find_family, (self.name,)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a config that is impossible in this family."""
        if not self.grouped_query and config.kv_heads != config.num_heads:
            raise ValueError(
                f"num_kv_heads={config.num_kv_heads}: family {self.name!r} has as many as "
                f"num_heads={config.num_heads}; use 'llama' for grouped-query attention"
            )
        if not self.rotary:
            for name in ("head_size", "rope_scaling"):
                if getattr(config, name) is not None:
                    raise ValueError(f"{name}: family {self.name!r} has no rotary positions")
        if "norm_eps" not in self.hugging_face.keys and config.norm_eps != 1e-5:
            raise ValueError(f"norm_eps={config.norm_eps}: family {self.name!r} always has 1e-5")
        if self.rotary and config.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {config.head_dim}")


def find_family(name: object) -> Family:
    """Returns the family of that name. Raises ValueError if there is none."""
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    family = import_module(f"axonn_ext.models.{name}").FAMILY
    assert isinstance(family, Family) and family.name == name
    return family
