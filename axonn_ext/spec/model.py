"""The sizes of a model, its Linears and its parameters, and the operations that it computes.

Legend: H hidden size, F size inside the MLP, V vocabulary, S tokens of a sequence; N, K out and in
features of a Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from axonn_ext.spec.family import FAMILIES, Family, find_family
from axonn_ext.spec.files.keys import about, check, key


class LinearSpec(NamedTuple):
    """A Linear with its whole weight [n, k], before a grid splits it."""

    name: str
    role: str
    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's longer rotary waves, for sequences longer than those of pretraining.

    The keys are those of config.json's rope_scaling with rope_type "llama3": waves longer than
    original_max_position_embeddings / low_freq_factor become `factor` times as long, those shorter
    than original_max_position_embeddings / high_freq_factor stay, and between the two the change is
    gradual. Source: transformers, modeling_rope_utils.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                "rope_scaling must have factor > 0 and 0 < low_freq_factor < high_freq_factor, got "
                f"{self}"
            )


@dataclass(frozen=True)
class ModelSizes:
    """The keys of a model; None means that the family or other sizes decide."""

    vocab_size: int = field(metadata=about("number of tokens in the vocabulary", int, minimum=1))
    hidden_size: int = field(metadata=about("features of the residual stream", int, minimum=1))
    num_layers: int = field(metadata=about("number of transformer blocks", int, minimum=1))
    num_heads: int = field(metadata=about("number of attention heads", int, minimum=1))
    sequence_length: int = field(metadata=about("tokens per sequence", int, minimum=1))
    family: str = key("gpt2", f"architecture: {', '.join(FAMILIES)}", choices=FAMILIES)
    num_kv_heads: int | None = key(
        None, "number of key-value heads (grouped-query attention); 0: num_heads", minimum=1
    )
    intermediate_size: int | None = key(
        None, "features inside the MLP; 0: the family's default", minimum=1
    )
    tie_embeddings: bool = key(True, "the output layer uses the embedding table as its weight")
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = key(1e-5, "epsilon that norms add to the variance", above=0)
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    head_size: int | None = key(
        None, "features per attention head; 0: hidden_size / num_heads", minimum=1
    )


@dataclass(frozen=True)
class ModelConfig(ModelSizes):
    """A decoder-only transformer.

    FAMILY of models/<family> has the common traits of the models of a family. rope_scaling: of
    rotary positions.

    Raises ValueError, which names the key, for illegal values, for sizes that do not divide each
    other, and for values that are impossible in the family.
    """

    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.rope_scaling, Mapping):  # from a checkpoint
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for large, small in (("hidden_size", "num_heads"), ("num_heads", "kv_heads")):
            if large == "hidden_size" and self.head_size is not None:
                continue
            if getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"{large}={getattr(self, large)} must be divisible by "
                    f"{small.replace('kv', 'num_kv')}={getattr(self, small)}"
                )
        self.traits.check(self)

    @cached_property
    def traits(self) -> Family:
        """The common traits of all models of its family."""
        return find_family(self.family)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def attention_size(self) -> int:
        """The features of the queries of all heads, and of attention's output."""
        return self.num_heads * self.head_dim

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
        """The rows of the up Linear's weight, which holds gate and up where the MLP is gated."""
        return self.mlp_size * (2 if self.traits.gated else 1)

    @cached_property
    def block_linears(self) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
        """The Linears qkv, out, up and down of one block, in the order of forward."""
        h, bias = self.hidden_size, self.traits.has_biases
        qkv_bias = bias or self.traits.has_qkv_bias
        return (
            LinearSpec("attention.qkv", "expand", self.qkv_size, h, qkv_bias),
            LinearSpec("attention.out", "contract", h, self.attention_size, bias),
            LinearSpec("mlp.up", "expand", self.up_size, h, bias),
            LinearSpec("mlp.down", "contract", h, self.mlp_size, bias),
        )

    @cached_property
    def head(self) -> LinearSpec:
        """lm_head, whose weight is also the embedding table where the two are tied."""
        return LinearSpec("lm_head", "expand", self.vocab_size, self.hidden_size, bias=False)

    @property
    def num_norm_vectors(self) -> int:
        """The number of norm parameters, of H elements each.

        There are two norms in a block and one at the end of the model.
        """
        return (2 * self.num_layers + 1) * self.traits.norm.num_vectors

    @property
    def head_norm_size(self) -> int:
        """The elements of the norms of queries and keys in one block, equal for all heads."""
        return 2 * self.head_dim if self.traits.has_head_norms else 0

    @property
    def num_positions(self) -> int:
        """The rows of the learned table of positions; 0 where positions are rotary."""
        return 0 if self.traits.rotary else self.sequence_length + self.traits.position_offset

    def num_parameters(self) -> int:
        """Returns the number of parameters of the whole model; a tied table counts once."""
        h = self.hidden_size
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        block = sum(w.n * w.k + (w.n if w.bias else 0) for w in self.block_linears)
        block += self.head_norm_size
        vectors = self.num_norm_vectors + self.num_positions
        return tables + self.num_layers * block + vectors * h

    def flops_per_token(self, *, whole_attention: bool = False) -> int:
        """Returns the floating-point operations of forward and backward per token.

        The token belongs to a sequence of full length. Forward needs 2 operations for each element
        of each matrix, including lm_head, and those of the two products of causal attention, each
        of which covers half the sequence on average. Backward needs twice as many as forward. These
        are model flops: recomputation is not counted.

        whole_attention: counts attention as if no token were masked, which is twice as much, like
        Megatron-LM (arXiv:2104.04473, equation 3) and PaLM (arXiv:2204.02311, appendix B).
        """
        block = self.block_flops_per_token(whole_attention=whole_attention)
        return self.num_layers * block + self.head_flops_per_token()

    def block_flops_per_token(self, *, whole_attention: bool = False) -> int:
        """Returns the share of one block in flops_per_token."""
        attention = self.attention_flops_per_token() * (2 if whole_attention else 1)
        return 3 * (2 * sum(w.n * w.k for w in self.block_linears) + attention)

    def attention_flops_per_token(self) -> int:
        """Returns the operations of causal attention in forward per token in one block."""
        return 2 * 2 * self.attention_size * self.sequence_length // 2

    def head_flops_per_token(self) -> int:
        """Returns the share of lm_head in flops_per_token."""
        return 3 * 2 * self.head.n * self.head.k
