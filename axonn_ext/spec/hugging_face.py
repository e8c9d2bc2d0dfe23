"""How transformers describes the models of a family: the names of weights, and config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from axonn_ext.spec.rope import ROPE_TYPES

if TYPE_CHECKING:
    from axonn_ext.spec.model import ModelConfig


@dataclass(frozen=True)
class StateNames:
    """The parameter names of transformers' models of a family, and what they store together.

    body: the module that contains everything but lm_head. blocks, norm, table, positions: its
        blocks, last norm, embedding and table of positions.
    block: the modules of a block, our name -> theirs. qkv and up are below.
    qkv: the modules with the queries, keys and values: three, or one that has them all.
    grouped: whether the rows of that one are grouped by key-value head, [q.., k, v] for each, like
        ours; otherwise it has all queries, then all keys, then all values.
    gate_up: the modules with gate and up of a gated MLP: two, or one that has gate, then up.
    transposed: whether matrices are stored as [in, out].
    head: their lm_head.
    own_table: our name of the embedding.
    """

    body: str
    blocks: str
    norm: str
    table: str
    block: Mapping[str, str]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    grouped: bool = False
    transposed: bool = False
    head: str = "lm_head"
    own_table: str = "embedding"
    positions: str = ""

    def public(self, name: str) -> str:
        """Returns their name for one of our parameters that they store separately."""
        first, _, rest = name.partition(".")
        if first == "lm_head":
            return f"{self.head}.{rest}"
        if first != "blocks":
            tops = {"norm": self.norm, self.own_table: self.table, "wpe": self.positions}
            return f"{self.body}.{tops[first]}.{rest}"
        number, _, rest = rest.partition(".")
        module, _, own = rest.rpartition(".")
        return f"{self.of_block(number)}{self.block[module]}.{own}"

    def of_block(self, number: int | str) -> str:
        """Returns the start of the names of a block's modules."""
        return f"{self.body}.{self.blocks}.{number}."


LAYER_TYPES = ("full_attention", "sliding_attention")  # whether a block has a window
UNROTATED = "no_rope_layers"  # the key of a list with 0 for each block without rotation, else 1


class BlockRule(NamedTuple):
    """Some of the blocks: "every" n-th or the "first" n. key: the key that replaces n."""

    which: str
    n: int
    key: str

    def has(self, block: int) -> bool:
        """Returns whether a block is one of them."""
        if self.which == "first":
            return block < self.n
        return bool(self.n) and (block + 1) % self.n == 0


class Multimodal(NamedTuple):
    """Models that also read images, and contain a text model of the family.

    model_type: of their config.json, whose text_config describes the text model.
    bodies: possible beginnings of the names of its tensors, instead of the text model's own body.
    others: the modules that are not part of the text model.
    """

    model_type: str
    bodies: tuple[str, ...]
    others: tuple[str, ...]


# "su" is the name of longrope in early Phi-3 models.
_ROPE_TYPES = {kind: kind for kind in ROPE_TYPES} | {"su": "longrope"}


@dataclass(frozen=True)
class RotaryKeys:
    """The keys of config.json for rotary positions.

    theta: the base. local_theta: the base in blocks with a window.
    share: the share of a head's features that are rotated; None: all are.
    unrotated: the blocks without rotation, if UNROTATED does not say; None: all blocks rotate.
    nested: rope_parameters has a table for the blocks with a window and one for the others.
    types: the types of rope_scaling -> those of RopeScaling.
    """

    theta: str = "rope_theta"
    local_theta: str | None = None
    share: str | None = None
    unrotated: BlockRule | None = None
    nested: bool = False
    types: Mapping[str, str] = field(default_factory=lambda: _ROPE_TYPES)


@dataclass(frozen=True)
class HuggingFace:
    """How a config.json of transformers describes a model of the family.

    model_type: the file's value for this key.
    when: keys and values of the file that tell the family from earlier ones of FAMILIES with the
        same model_type.
    architecture: the transformers class that has the weights.
    names: the names of its parameters.
    keys: the field of ModelConfig -> the key of config.json.
    defaults: key -> the value that transformers uses if the key is missing. None means that
        ModelConfig's default applies.
    multimodal: models that also read images, and contain a model of the family.
    activation_key: the key that names the activation.
    activations: the names of activations equivalent to that of the family's MLP; transformers'
        default comes first.
    bias_keys: a key that may be true -> the Linears of a block that then have biases.
    must_be_false: the key of a feature that the family lacks -> the reason.
    must_be_true: the key of a feature that a model of the family always has here -> the reason.
        In transformers a missing key must mean this too, since config_json does not write it.
    must_equal: a key that must have the same value as another key, if present -> that other key.
    head_size: the head_dim that transformers uses if the key is missing; None: hidden_size /
        num_heads. Only families with rotary positions have the key, and of these only those with
        has_head_dim.
    rotary: the keys for rotary positions.
    powers: the fields in `keys` of which the file has this power.
    window_key: the key of the attention window, in tokens; null means that there is no window.
        window_flag: the key without which there is none. full_layers: the blocks that have
        none, if layer_types does not say.
    """

    model_type: str
    architecture: str
    names: StateNames
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    activation_key: str
    activations: tuple[str, ...]
    when: Mapping[str, Any] = field(default_factory=dict)
    multimodal: Multimodal | None = None
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must_be_false: Mapping[str, str] = field(default_factory=dict)
    must_be_true: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    window_key: str | None = None
    window_flag: str | None = None
    full_layers: BlockRule | None = None
    head_size: int | None = None
    has_head_dim: bool = True
    rotary: RotaryKeys = field(default_factory=RotaryKeys)
    powers: Mapping[str, float] = field(default_factory=dict)

    def describes(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a config.json has the model_type and the keys that tell the family."""
        told = {"model_type": self.model_type, **self.when}
        return all(values.get(key) == value for key, value in told.items())

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the contents of transformers' config.json for a model of the family."""
        values: dict[str, Any] = {"model_type": self.model_type, **self.when}
        sizes: dict[str, Any] = {
            "num_kv_heads": config.kv_heads,
            "intermediate_size": config.mlp_size,
            "attention_scale": config.score_scale,
            "embedding_scale": config.embedding_factor,
        }
        for ours, theirs in self.keys.items():
            value = sizes[ours] if ours in sizes else getattr(config, ours)
            values[theirs] = _power(value, self.powers[ours]) if ours in self.powers else value
        values |= {key: values[other] for key, other in self.must_equal.items()}
        values[self.activation_key] = self.activations[0]
        if config.traits.rotary:
            values |= self._rotation(config)
        values |= {key: which[0] in config.biased for key, which in self.bias_keys.items()}
        if self.window_key is not None and (config.window or self.window_flag is None):
            # Models with two kinds of blocks need one, even if no block has it.
            unused = self.defaults[self.window_key] if self.full_layers else None
            values[self.window_key] = config.window or unused
        if self.window_flag is not None:
            values[self.window_flag] = config.window is not None
        if self.full_layers is not None:
            windows = [config.window_of(i) for i in range(config.num_layers)]
            values["layer_types"] = [LAYER_TYPES[window is not None] for window in windows]
        return values

    def _rotation(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the keys for rotary positions, and for the size of the heads."""
        keys, rope = self.rotary, config.rope_scaling
        values: dict[str, Any] = {keys.theta: config.rope_theta}
        if self.has_head_dim:
            values["head_dim"] = config.head_dim
        if keys.share is not None:
            values[keys.share] = _share(config.rotary_dim, config.head_dim)
        if keys.local_theta is not None:
            values[keys.local_theta] = config.local_rope_theta or config.rope_theta
        if keys.unrotated is not None:
            values[UNROTATED] = [int(config.rotates(i)) for i in range(config.num_layers)]
        if rope is not None:
            values["rope_scaling"] = rope.as_json()
            original = rope.original_max_position_embeddings
            if rope.rope_type == "dynamic":  # it begins after this length
                values[self.keys["sequence_length"]] = original
            if rope.rope_type == "longrope":
                values["original_max_position_embeddings"] = original
        if keys.nested:
            plain = {"rope_type": "default", "rope_theta": config.rope_theta}
            tables = (plain | values.get("rope_scaling", {}), plain)
            values["rope_parameters"] = dict(zip(LAYER_TYPES, tables, strict=True))
        return values


def _share(part: int, whole: int) -> float:
    """Returns the share of which transformers makes the part, by int(whole * share)."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1)


def _power(value: float, exponent: float) -> float:
    """Returns value**exponent, or the whole number that it is, except for rounding."""
    power = value**exponent
    return round(power) if math.isclose(power, round(power), rel_tol=1e-12) else power
