"""Rotary frequencies scaled for longer sequences, and how config.json states them.

Sources: transformers, modeling_rope_utils.py; Peng et al., arXiv:2309.00071 (yarn); Ding et al.,
arXiv:2402.13753 (longrope); Dubey et al., arXiv:2407.21783 (llama3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.tables import Table

ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn", "longrope")
# config.json has the table under one of these names; the second is that of transformers 5.
ROPE_KEYS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies change for sequences longer than those of pretraining.

    The names are those of config.json. A wave is as long as the tokens of one turn.

    llama3   waves longer than original_max_position_embeddings / low_freq_factor become `factor`
             times as long, those shorter than original_max_position_embeddings / high_freq_factor
             stay, and between the two the change is gradual
    linear   all waves become `factor` times as long
    dynamic  in sequences longer than original_max_position_embeddings, rope_theta grows with the
             length
    yarn     waves that turn less than beta_slow times become `factor` times as long, those that
             turn more than beta_fast times stay, and between the two the change is gradual;
             cosines and sines are multiplied by attention_factor
    longrope each wave becomes as many times as long as short_factor says, and in sequences longer
             than original_max_position_embeddings as long_factor says; attention_factor as in yarn

    Raises ValueError for values that contradict each other.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    rope_type: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_scaling.rope_type must be one of {', '.join(ROPE_TYPES)}, "
                f"got {self.rope_type!r}"
            )
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                "rope_scaling must have factor > 0 and 0 < low_freq_factor < high_freq_factor, got "
                f"{self}"
            )

    def check_size(self, rotary_size: int) -> None:
        """Raises ValueError unless longrope has a factor for each pair of features, and dynamic
        several pairs."""
        if self.rope_type == "dynamic" and rotary_size < 4:
            raise ValueError(
                f"rope_scaling: dynamic needs at least 4 rotated features, got {rotary_size}"
            )
        for name in ("short_factor", "long_factor"):
            found = len(getattr(self, name))
            if self.rope_type == "longrope" and found != rotary_size // 2:
                raise ValueError(
                    f"rope_scaling.{name} must have {rotary_size // 2} numbers, one for each pair "
                    f"of rotated features, got {found}"
                )

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")

    def changes_at(self, length: int) -> bool:
        """Returns whether sequences of this length have other frequencies than shorter ones."""
        return self.by_length and length > self.original_max_position_embeddings

    def has_long_tables(self, length: int) -> bool:
        """Returns whether all sequences of up to this length that are longer than the original
        share their frequencies."""
        return self.rope_type == "longrope" and self.changes_at(length)

    def as_json(self) -> dict[str, Any]:
        """Returns the table of config.json, with the keys that the type has."""
        keys = {"original_max_position_embeddings", *_KEYS[self.rope_type]}
        values = {key: getattr(self, key) for key in sorted(keys)}
        as_lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {"rope_type": self.rope_type, **as_lists}


_KEYS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}


def frequencies(
    theta: float, size: int, scaling: RopeScaling | None, length: int = 0
) -> tuple[list[float], float]:
    """Returns the angle per token of each pair of features, and the factor of cosines and sines.

    size: the number of rotated features. length: that of the sequence.
    """
    plain = [theta ** (-2 * i / size) for i in range(size // 2)]
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_position_embeddings
    match scaling.rope_type:
        case "llama3":
            return [_gradual(f, scaling) for f in plain], 1.0
        case "linear":
            return [f / scaling.factor for f in plain], 1.0
        case "dynamic":
            growth = scaling.factor * max(length, original) / original - (scaling.factor - 1)
            base = theta * growth ** (size / (size - 2))
            return [base ** (-2 * i / size) for i in range(size // 2)], 1.0
        case "yarn":
            shares = _yarn_shares(theta, size, scaling)
            mixed = [f * (k + (1 - k) / scaling.factor) for f, k in zip(plain, shares, strict=True)]
            return mixed, scaling.attention_factor
    factors = scaling.long_factor if length > original else scaling.short_factor
    divided = [f / by for f, by in zip(plain, factors, strict=True)]
    return divided, scaling.attention_factor


def _gradual(frequency: float, scaling: RopeScaling) -> float:
    """Returns a frequency by llama3's rule."""
    waves = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # per sequence
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(max((waves - low) / (high - low), 0), 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def _yarn_shares(theta: float, size: int, scaling: RopeScaling) -> Sequence[float]:
    """Returns how much of each frequency stays, from 0 to 1 (arXiv:2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        length = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001
    return [1 - min(max((i - first) / width, 0), 1) for i in range(size // 2)]


def read_rope_scaling(
    rope: Table, whole: Table, longest: int, types: Mapping[str, str]
) -> RopeScaling | None:
    """Returns the scaling that a table of config.json describes, or None if it has none.

    whole: the file. longest: its max_position_embeddings. types: rope_type in the file -> ours.
    Raises InputError.
    """
    name = "rope_type" if rope.has("rope_type") or not rope.has("type") else "type"
    kind = rope.one_of(name, ("default", *types), "default")
    if kind == "default":
        return None
    values = _values(types[kind], rope, whole, longest)
    try:
        return RopeScaling(rope_type=types[kind], **values)
    except ValueError as error:
        raise InputError(f"{rope.file}: {error}") from None


def _values(kind: str, rope: Table, whole: Table, longest: int) -> dict[str, Any]:
    """Returns the fields of the scaling, with transformers' defaults."""
    name = "original_max_position_embeddings"
    original = longest
    if kind != "dynamic":
        original = whole.count(name) if whole.has(name) else rope.count(name, longest)
    values: dict[str, Any] = {name: original}
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            numbers = rope.list(key)
            if not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
                raise rope.error(key, "a list of positive numbers")
            values[key] = tuple(map(float, numbers))
        factor = rope.positive("factor", longest / original)
        stretched = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
        return values | {"attention_factor": rope.positive("attention_factor", stretched)}
    if kind == "yarn":
        factor = rope.positive("factor", longest / original)
        scales = [rope.at_least(key, 0, 0.0) for key in ("mscale", "mscale_all_dim")]
        over, under = scales if all(scales) else (1.0, 0.0)
        stretched = _mscale(factor, over) / _mscale(factor, under)
        return values | {
            "factor": factor,
            "beta_fast": rope.positive("beta_fast", 32.0),
            "beta_slow": rope.positive("beta_slow", 1.0),
            "truncate": rope.flag("truncate", True),
            "attention_factor": rope.positive("attention_factor", stretched),
        }
    return values | {key: rope.positive(key) for key in _KEYS[kind]}


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
