"""What a model is, how it is run, and whether the two fit a grid. Needs no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_ext.grid import GridShape
from axonn_ext.ops import ALGORITHMS

FAMILIES = ("gpt2", "llama")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    family "gpt2": learned positions, LayerNorm, GELU (tanh form), biases.
    family "llama": rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

    num_kv_heads: default num_heads, which gpt2 keeps.
    intermediate_size: default 4 hidden_size (gpt2), or 8/3 hidden_size rounded up to a multiple of
    64 (llama).
    sequence_length: the longest.
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
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "sequence_length")
        for name in (*sizes, "num_kv_heads", "intermediate_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")

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

    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied table counts once."""
        h, layers = self.hidden_size, self.num_layers
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        if self.family == "llama":
            return tables + layers * (self._matrix_elements() + 2 * h) + h
        biases = self.qkv_size + h + self.up_size + h
        return (
            tables
            + self.sequence_length * h
            + layers * (self._matrix_elements() + biases + 4 * h)
            + 2 * h
        )

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward for one token of a full sequence.

        Three times forward's: 2 for each element of each matrix (lm_head included), and causal
        attention's two products over, on average, half the sequence.
        """
        attention = 2 * 2 * self.hidden_size * self.sequence_length // 2
        forward = self.num_layers * (2 * self._matrix_elements() + attention)
        return 3 * (forward + 2 * self.vocab_size * self.hidden_size)

    def _matrix_elements(self) -> int:
        """Elements of one block's matrices."""
        h = self.hidden_size
        return h * (self.qkv_size + h + self.up_size + self.mlp_size)


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is run on a grid; changes no result beyond rounding.

    layout: "sharded" (rows stay scattered between layers) or "replicated" (AxoNN's own).
    heads_over_y: y splits heads, not sequences, in attention ("sharded" only).
    save_gathered: keep a Linear's gathered input for backward instead of gathering again.
    reshard_after_forward: gather weights over z again in backward instead of keeping them.
    recompute: activation checkpointing, block by block.
    algorithm: of the fused ops: "auto", "fused", "chunked" or "sequential".
    """

    layout: str = "sharded"
    heads_over_y: bool = False
    save_gathered: bool = False
    reshard_after_forward: bool = True
    recompute: bool = False
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in (
            ("layout", ("sharded", "replicated")),
            ("algorithm", ALGORITHMS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError("heads_over_y needs layout 'sharded'")


def check(
    config: ModelConfig, parallel: ParallelConfig, grid: GridShape, *, batch_size: int
) -> list[str]:
    """Every divisibility rule that is violated, with its numbers; empty if the model runs.

    batch_size: sequences of one micro-batch, over all data and z coordinates. Exact: what is
    legal here runs, what is not raises (shared rules: docs/architecture.md).
    """
    sharded, tokens = parallel.layout == "sharded", batch_size * config.sequence_length
    batch_axes = ("data", "z", "y") if sharded and not parallel.heads_over_y else ("data", "z")
    rules: list[tuple[str, int, tuple[str, ...]]] = [
        ("sequences of a micro-batch", batch_size, batch_axes)
    ]
    if sharded:
        rules += [
            ("tokens of a micro-batch (residual rows)", tokens, ("data", "z", "x")),
            ("tokens of a micro-batch (MLP rows)", tokens, ("data", "z", "y")),
        ]
    rules += [
        ("num_kv_heads", config.kv_heads, ("x", "y") if parallel.heads_over_y else ("x",)),
        ("hidden_size", config.hidden_size, ("y", "z")),
        ("qkv features", config.qkv_size, ("x", "z")),
        ("intermediate_size", config.mlp_size, ("x",)),
        ("up features", config.up_size, ("x", "z")),
        ("vocab_size", config.vocab_size, ("x", "z")),
    ]
    problems = []
    for what, value, axes in rules:
        parts = math.prod(getattr(grid, axis) for axis in axes)
        if value % parts:
            sizes = " * ".join(f"{axis}={getattr(grid, axis)}" for axis in axes)
            hint = ""
            if what.startswith("sequences") and "y" in axes:
                hint = "; or set heads_over_y, or layout 'replicated'"
            problems.append(
                f"{what}: {value} must be divisible by {parts} ({sizes}): change the grid, or to "
                f"{math.ceil(value / parts) * parts}{hint}"
            )
    return problems
