"""The common traits of the models of a family, and the list of all families.

A family is one word of `FAMILIES` below and a file `axonn_ext/spec/families/<its name>.py`, which
defines FAMILY, a `Family` as below. These files do not import torch, so that the planner can read
them. One set of modules (models/transformer.py, models/block.py) and one model in plain torch.nn
(models/plain.py) follow the traits of every family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axonn_ext.spec.hugging_face import HuggingFace

if TYPE_CHECKING:
    from axonn_ext.spec.model import ModelConfig

# A family's module is loaded when a model of the family is first described.
FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "opt", "phi3", "granite", "smollm3", "stablelm",
    "starcoder2", "gpt_neox", "cohere", "glm4", "seed_oss", "olmo2",
    "gemma", "gemma2", "gemma3", "olmo3", "cohere2", "falcon", "falcon_40b", "falcon_11b",
    "gpt_neox_20b",
)  # fmt: skip

BLOCK_LINEARS = ("qkv", "out", "up", "down")
BLOCK_NORMS = ("norm_1", "after_1", "norm_2", "after_2")


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows.

    num_vectors: the number of parameters, of hidden_size elements each.
    num_statistics: the numbers per row that the ranks along y combine, in fp32.
    gathers: forward all-gathers the statistics over y and combines them on each rank; otherwise it
    all-reduces them.
    plus_one: rows are multiplied by 1 + weight.
    """

    num_vectors: int
    num_statistics: int
    gathers: bool
    plus_one: bool = False

    @property
    def centred(self) -> bool:
        """Whether the mean is subtracted: LayerNorm rather than RMSNorm."""
        return self.num_statistics == 2


LAYER_NORM = Norm(num_vectors=2, num_statistics=2, gathers=True)  # mean and variance
LAYER_NORM_WITHOUT_BIAS = Norm(num_vectors=1, num_statistics=2, gathers=True)
RMS_NORM = Norm(num_vectors=1, num_statistics=1, gathers=False)  # mean of squares
RMS_NORM_PLUS_ONE = Norm(num_vectors=1, num_statistics=1, gathers=False, plus_one=True)


# The factors and caps of a model -> their values where a family has none.
_SCALES: Mapping[str, float | None] = {
    "attention_scale": None, "embedding_scale": None, "residual_scale": 1.0, "logits_scale": 1.0,
    "attention_softcap": None, "logits_softcap": None,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The facts about a family of decoder-only transformers.

    name               the value of ModelConfig.family
    biases             the Linears of a block that have biases; lm_head never has one
    qk_norm            "head": the queries and the keys of each head are normalised; "all": those of
                       all heads together
    position_offset    the row of the learned table for position 0; rows before it are unused
    activation         of the MLP: "gelu" (its tanh form), "gelu_erf", "relu", or "swiglu" (SiLU)
                       and "geglu" (tanh GELU), where the up Linear computes gate and up, and the
                       MLP multiplies up by the activated gate
    scales_embedding   the embedding's rows are multiplied by sqrt(hidden_size)
    rotary             positions rotate queries and keys; otherwise a table of positions is learned
    interleaved        transformers rotates feature 2 i of a head with feature 2 i + 1; otherwise
                       feature i with feature i + half of those that are rotated
    grouped_query      whether num_kv_heads may be less than num_heads
    multi_query        all heads share one key-value head
    norm               the kind of all norms over the residual stream
    norms              the norms of a block: norm_1 before and after_1 after the attention, norm_2
                       and after_2 before and after the MLP
    parallel           attention and MLP have the same input, the block's; without a norm_2 they
                       share norm_1's result
    rotates_windows    only the blocks with a window rotate
    rotates_locally    blocks with a window rotate by local_rope_theta, without rope_scaling
    default_mlp_size   hidden_size -> the intermediate_size of a model that does not give one
    hugging_face       how transformers describes models of the family
    """

    name: str
    activation: str
    rotary: bool
    grouped_query: bool
    norm: Norm
    default_mlp_size: Callable[[int], int]
    hugging_face: HuggingFace
    biases: tuple[str, ...] = ()
    multi_query: bool = False
    qk_norm: str = ""
    position_offset: int = 0
    norms: tuple[str, ...] = ("norm_1", "norm_2")
    parallel: bool = False
    interleaved: bool = False
    scales_embedding: bool = False
    rotates_windows: bool = False
    rotates_locally: bool = False

    @property
    def gated(self) -> bool:
        """Whether the up Linear computes gate and up."""
        return self.activation in ("swiglu", "geglu")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the name, by which another process finds the family."""
        return find_family, (self.name,)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a config that is impossible in this family."""
        usual = 1 if self.multi_query else config.num_heads
        if not self.grouped_query and config.kv_heads != usual:
            has = "one" if self.multi_query else f"as many as num_heads={config.num_heads}"
            raise ValueError(
                f"num_kv_heads={config.num_kv_heads}: family {self.name!r} has {has}; other "
                "families have grouped-query attention"
            )
        if not self.rotary:
            for name in ("head_size", "rope_scaling"):
                if getattr(config, name) is not None:
                    raise ValueError(f"{name}: family {self.name!r} has no rotary positions")
        if "norm_eps" not in self.hugging_face.keys and config.norm_eps != 1e-5:
            raise ValueError(f"norm_eps={config.norm_eps}: family {self.name!r} always has 1e-5")
        self._check_details(config)
        if config.rope_scaling is not None:
            config.rope_scaling.check_size(config.rotary_dim)
        if self.rotary and config.rotary_dim % 2:
            name = "head_dim" if config.rotary_size is None else "rotary_size"
            raise ValueError(f"rotary embedding needs an even {name}, got {config.rotary_dim}")

    def _check_details(self, config: ModelConfig) -> None:
        """Raises ValueError for values that no model of the family has in transformers."""
        theirs, keys = self.hugging_face, self.hugging_face.rotary
        rope = config.rope_scaling
        told = {
            "rotary_size": keys.share, "no_rope_layers": keys.unrotated,
            "window": theirs.window_key, "window_layers": theirs.full_layers,
            "local_rope_theta": keys.local_theta, "head_size": theirs.has_head_dim,
        } | {name: name in theirs.keys for name in _SCALES}  # fmt: skip
        for name, is_told in told.items():
            if not is_told and getattr(config, name) != _SCALES.get(name):
                raise ValueError(
                    f"{name}={getattr(config, name)}: models of family {self.name!r} have no other "
                    f"than {_SCALES.get(name)}"
                )
        if rope is not None and rope.rope_type not in keys.types.values():
            raise ValueError(f"rope_scaling: family {self.name!r} has no {rope.rope_type}")
        if self.rotates_windows and config.window is None:
            raise ValueError(
                f"window: family {self.name!r} needs one, since only its blocks rotate"
            )
        differ = set(config.biased) ^ set(self.biases)
        groups = [set(which) for which in theirs.bias_keys.values()]
        if differ != set().union(*(group for group in groups if group <= differ)):
            raise ValueError(
                f"biases={config.biases}: family {self.name!r} has {self.biases}, and may differ "
                f"in {list(theirs.bias_keys.values())}"
            )


def find_family(name: object) -> Family:
    """Returns the family of that name. Raises ValueError if there is none."""
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    family = import_module(f"axonn_ext.spec.families.{name}").FAMILY
    assert isinstance(family, Family) and family.name == name
    return family
