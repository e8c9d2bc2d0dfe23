"""The sizes of a model: its Linears, its parameters, its arithmetic.

Legend: H hidden, F inside the MLP, V vocabulary, S tokens of a sequence; N, K a Linear's out and in
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from axonn_ext.spec.family import Family, find_family

_COUNTS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "sequence_length", "num_kv_heads",
    "intermediate_size",
)  # fmt: skip
_OPTIONAL = ("num_kv_heads", "intermediate_size")


class LinearSpec(NamedTuple):
    """A Linear; whole sizes: weight [n, k]."""

    name: str
    role: str
    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    family: one of `FAMILIES`; what its models have in common is in models/<family>/family.py.
    num_kv_heads: default num_heads. intermediate_size: default the family's, by hidden_size.
    sequence_length: the longest.

    Raises ValueError for sizes that are no whole numbers >= 1, that do not divide each other, or
    that the family cannot have, and for a family that there is not.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    sequence_length: int
    family: str = "gpt2"
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        traits = self.traits
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        for large, small in (("hidden_size", "num_heads"), ("num_heads", "kv_heads")):
            if getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"{large}={getattr(self, large)} must be divisible by "
                    f"{small.replace('kv', 'num_kv')}={getattr(self, small)}"
                )
        traits.check(self)

    @cached_property
    def traits(self) -> Family:
        """What it has in common with all models of its family."""
        return find_family(self.family)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        return self.traits.default_mlp_size(self.hidden_size)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up_size(self) -> int:
        """Rows of the up Linear: gate and up together where the MLP is gated."""
        return self.mlp_size * (2 if self.traits.gated else 1)

    @cached_property
    def block_linears(self) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
        """qkv, out, up, down: the Linears of one block, in the order of forward."""
        h, bias = self.hidden_size, self.traits.has_biases
        return (
            LinearSpec("attention.qkv", "expand", self.qkv_size, h, bias),
            LinearSpec("attention.out", "contract", h, h, bias),
            LinearSpec("mlp.up", "expand", self.up_size, h, bias),
            LinearSpec("mlp.down", "contract", h, self.mlp_size, bias),
        )

    @cached_property
    def head(self) -> LinearSpec:
        """lm_head; its weight is the embedding's table, too, where they are tied."""
        return LinearSpec("lm_head", "expand", self.vocab_size, self.hidden_size, bias=False)

    @property
    def num_norm_vectors(self) -> int:
        """Parameters of H elements: those of the norms, two in a block and one at the end."""
        return (2 * self.num_layers + 1) * self.traits.norm.num_vectors

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions, if they are learned."""
        return 0 if self.traits.rotary else self.sequence_length

    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied table counts once."""
        h = self.hidden_size
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        block = sum(w.n * w.k + (w.n if w.bias else 0) for w in self.block_linears)
        vectors = self.num_norm_vectors + self.num_positions
        return tables + self.num_layers * block + vectors * h

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward for one token of a full sequence.

        Three times forward's: 2 for each element of each matrix (lm_head included), and causal
        attention's two products over, on average, half the sequence. Recomputation is not counted:
        what is done twice counts once (model flops).
        """
        attention = 2 * 2 * self.hidden_size * self.sequence_length // 2
        matrices = sum(w.n * w.k for w in self.block_linears)
        forward = self.num_layers * (2 * matrices + attention)
        return 3 * (forward + 2 * self.vocab_size * self.hidden_size)
