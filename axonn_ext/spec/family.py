"""What the models of a family have in common, and the list of all families.

A family is one folder, `axonn_ext/models/<its name>/`, and one line of `FAMILIES` below:

    family.py  FAMILY, the Family of this module: no Torch, so that the planner reads it, too
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

# Each is loaded when a model of it is first described.
FAMILIES = ("gpt2", "llama", "mistral")


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows.

    num_vectors: parameters of hidden_size elements. num_statistics: what a row's ranks along y sum,
    in fp32. gathers: forward gathers the statistics of each rank, and sums them itself.
    """

    num_vectors: int
    num_statistics: int
    gathers: bool


LAYER_NORM = Norm(num_vectors=2, num_statistics=2, gathers=True)  # mean and variance
RMS_NORM = Norm(num_vectors=1, num_statistics=1, gathers=False)  # mean of squares


@dataclass(frozen=True)
class HuggingFace:
    """How a config.json of transformers describes a model of the family.

    model_type: the value of that key. keys: ours -> theirs. defaults: of their keys that may be
    missing, as transformers has them; None: ours decides. activations: those that compute the same
    as the family's MLP, transformers' default first; activation_key: where one is named.
    must_be_false, must_be_null: keys for what the family does not have -> why it has not.
    window_key: the key of the tokens that attention reaches back over; null: over all of them.
    Sequences are no longer than that here, for then attention is the same as without a window.
    """

    model_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    activation_key: str
    activations: tuple[str, ...]
    must_be_false: Mapping[str, str] = field(default_factory=dict)
    must_be_null: Mapping[str, str] = field(default_factory=dict)
    window_key: str | None = None


@dataclass(frozen=True)
class Family:
    """The facts about a family of decoder-only transformers.

    name               the value of ModelConfig.family; the modules are in axonn_ext.models.<name>
    title              as people call it
    has_biases         of the Linears of a block; lm_head never has one
    gated              the up Linear makes gate and up, of which the MLP multiplies one by the other
    rotary             positions turn queries and keys; otherwise they are a table that is learned
    grouped_query      num_kv_heads may be below num_heads
    norm               before attention, before the MLP, and at the end
    default_mlp_size   intermediate_size by hidden_size, where none is given
    hugging_face       how transformers describes such models
    """

    name: str
    title: str
    has_biases: bool
    gated: bool
    rotary: bool
    grouped_query: bool
    norm: Norm
    default_mlp_size: Callable[[int], int]
    hugging_face: HuggingFace

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process finds the family by its name."""
        return find_family, (self.name,)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that the family cannot have."""
        if not self.grouped_query and config.kv_heads != config.num_heads:
            raise ValueError(
                f"num_kv_heads={config.num_kv_heads}: family {self.name!r} has as many as "
                f"num_heads={config.num_heads}; use 'llama' for grouped-query attention"
            )
        if self.rotary and config.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {config.head_dim}")


def find_family(name: object) -> Family:
    """The family of that name. Raises ValueError if there is none."""
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    family = import_module(f"axonn_ext.models.{name}.family").FAMILY
    assert isinstance(family, Family) and family.name == name
    return family
