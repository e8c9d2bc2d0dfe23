"""What a model is made of: the sizes of its Linears, its parameters, its arithmetic.

Legend: H hidden, F inside the MLP, V vocabulary, S tokens of a sequence; N, K a Linear's out and in
features. Holds the same numbers as `axonn_ext.models`, without Torch; a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

FAMILIES = ("gpt2", "llama")
ROLES = {"expand": ("x", "y"), "contract": ("y", "x")}  # (r, s); see axonn_ext.nn.Linear


class Linear(NamedTuple):
    """Whole sizes: weight [N, K]."""

    name: str
    role: str
    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer of one of the families of `axonn_ext.models`.

    num_kv_heads: default num_heads. intermediate_size: default 4 H (gpt2), or 8/3 H rounded up to
    a multiple of 64 (llama).

    Raises ValueError for sizes below 1, or that do not divide each other.
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

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            number = "int" in str(field.type) and not (value is None and "None" in str(field.type))
            if number and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} must be a whole number >= 1, got {value!r}")
        for large, small in (("hidden_size", "num_heads"), ("num_heads", "kv_heads")):
            if getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"{large}={getattr(self, large)} must be divisible by "
                    f"{small.replace('kv', 'num_kv')}={getattr(self, small)}"
                )
        if self.family == "gpt2" and self.kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: family 'gpt2' has as many as num_heads="
                f"{self.num_heads}; use 'llama' for grouped-query attention"
            )

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
        if self.family == "gpt2":
            return 4 * self.hidden_size
        return math.ceil(8 * self.hidden_size / 3 / 64) * 64

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up_size(self) -> int:
        """Rows of the up Linear: gate and up together for llama."""
        return self.mlp_size * (2 if self.family == "llama" else 1)

    @cached_property
    def block_linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """qkv, out, up, down: the Linears of one block, in the order of forward."""
        h, bias = self.hidden_size, self.family == "gpt2"
        return (
            Linear("attention.qkv", "expand", self.qkv_size, h, bias),
            Linear("attention.out", "contract", h, h, bias),
            Linear("mlp.up", "expand", self.up_size, h, bias),
            Linear("mlp.down", "contract", h, self.mlp_size, bias),
        )

    @cached_property
    def head(self) -> Linear:
        """lm_head; its weight is the embedding's table, too, where they are tied."""
        return Linear("lm_head", "expand", self.vocab_size, self.hidden_size, bias=False)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied table counts once."""
        h = self.hidden_size
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        norm = h * (1 if self.family == "llama" else 2)
        positions = 0 if self.family == "llama" else self.sequence_length * h
        block = sum(w.n * w.k + (w.n if w.bias else 0) for w in self.block_linears) + 2 * norm
        return tables + positions + self.num_layers * block + norm

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
