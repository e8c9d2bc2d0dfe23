"""The sizes of a model, its Linears and its parameters, and the operations that it computes.

Legend: H hidden size, F size inside the MLP, V vocabulary, S tokens of a sequence; N, K out and in
features of a Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from axonn_ext.spec.family import BLOCK_LINEARS, FAMILIES, Family, find_family
from axonn_ext.spec.files.keys import about, check, key
from axonn_ext.spec.rope import RopeScaling


class LinearSpec(NamedTuple):
    """A Linear with its whole weight [n, k], before a grid splits it."""

    name: str
    role: str
    n: int
    k: int
    bias: bool


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
        None, "number of key-value heads (grouped-query attention); 0: num_heads, or 1 in falcon",
        minimum=1,
    )  # fmt: skip
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
    rotary_size: int | None = key(
        None, "features of a head that positions rotate, in families that rotate a part; 0: all",
        minimum=2,
    )  # fmt: skip
    window: int | None = key(
        None, "tokens that a token attends to in blocks with a window; 0: all before it", minimum=1
    )
    local_rope_theta: float | None = key(
        None, "rope_theta of blocks with a window; 0: rope_theta", kind=float, above=0
    )
    attention_softcap: float | None = key(
        None, "c of scores c tanh(s / c) of attention; 0: no cap", kind=float, above=0
    )
    logits_softcap: float | None = key(
        None, "c of logits c tanh(s / c); 0: no cap", kind=float, above=0
    )


@dataclass(frozen=True)
class ModelConfig(ModelSizes):
    """A decoder-only transformer.

    FAMILY of spec/families/<family>.py has the common traits of the models of a family. None
    means that the family decides.

    rope_scaling: of rotary positions. no_rope_layers: the numbers of the blocks without rotation.
    window_layers: the numbers of the blocks with a window. biases: the Linears of a block that have
    biases, of spec.family.BLOCK_LINEARS. attention_scale: the factor of the scores; default
    1 / sqrt(head_dim). embedding_scale, residual_scale, logits_scale: factors of the embedding's
    rows, of what attention and MLP add to the residual stream, and of the logits.

    Raises ValueError, which names the key, for illegal values, for sizes that do not divide each
    other, and for values that are impossible in the family.
    """

    rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] | None = None
    window_layers: tuple[int, ...] | None = None
    biases: tuple[str, ...] | None = None
    attention_scale: float | None = None
    embedding_scale: float | None = None
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.rope_scaling, Mapping):  # from a checkpoint
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for name in ("no_rope_layers", "biases", "window_layers"):
            if isinstance(value := getattr(self, name), list):  # from a checkpoint
                object.__setattr__(self, name, tuple(value))
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
        if self.num_kv_heads is None:
            return 1 if self.traits.multi_query else self.num_heads
        return self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def rotary_dim(self) -> int:
        """The features of a head that are rotated, where positions are rotary."""
        return self.head_dim if self.rotary_size is None else self.rotary_size

    def rotates(self, block: int) -> bool:
        """Returns whether a block rotates queries and keys."""
        if self.traits.rotates_windows:
            return self.window_of(block) is not None
        layers, rule = self.no_rope_layers, self.traits.hugging_face.rotary.unrotated
        unrotated = block in layers if layers is not None else rule and rule.has(block)
        return self.traits.rotary and not unrotated

    @property
    def score_scale(self) -> float:
        """The factor of the scores of attention."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def embedding_factor(self) -> float:
        """The factor of the embedding's rows."""
        if self.embedding_scale is not None:
            return self.embedding_scale
        return self.hidden_size**0.5 if self.traits.scales_embedding else 1.0

    def window_of(self, block: int) -> int | None:
        """Returns how many tokens a token attends to in a block, itself included; None: all."""
        layers, full = self.window_layers, self.traits.hugging_face.full_layers
        has_window = block in layers if layers is not None else not (full and full.has(block))
        return self.window if has_window else None

    def is_local(self, block: int) -> bool:
        """Returns whether a block rotates by local_theta, without rope_scaling."""
        return self.local_theta is not None and self.window_of(block) is not None

    @property
    def local_theta(self) -> float | None:
        """rope_theta of the blocks with a window, where these have tables of their own."""
        if self.window is None or not self.traits.rotates_locally:
            return None
        return self.local_rope_theta or self.rope_theta

    @property
    def biased(self) -> tuple[str, ...]:
        """The Linears of a block that have biases."""
        return self.traits.biases if self.biases is None else self.biases

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
        h = self.hidden_size
        qkv, out, up, down = (name in self.biased for name in BLOCK_LINEARS)
        return (
            LinearSpec("attention.qkv", "expand", self.qkv_size, h, qkv),
            LinearSpec("attention.out", "contract", h, self.attention_size, out),
            LinearSpec("mlp.up", "expand", self.up_size, h, up),
            LinearSpec("mlp.down", "contract", h, self.mlp_size, down),
        )

    @cached_property
    def head(self) -> LinearSpec:
        """lm_head, whose weight is also the embedding table where the two are tied."""
        return LinearSpec("lm_head", "expand", self.vocab_size, self.hidden_size, bias=False)

    @property
    def num_norm_vectors(self) -> int:
        """The number of norm parameters of H elements, in the blocks and after the last."""
        norms = len(self.traits.norms) * self.num_layers + 1
        return norms * self.traits.norm.num_vectors

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """The elements of the norms of queries and of keys in one block, if it has them."""
        heads = {"": (), "head": (1, 1), "all": (self.num_heads, self.kv_heads)}
        return tuple(count * self.head_dim for count in heads[self.traits.qk_norm])

    @property
    def num_positions(self) -> int:
        """The rows of the learned table of positions; 0 where positions are rotary."""
        return 0 if self.traits.rotary else self.sequence_length + self.traits.position_offset

    def num_parameters(self) -> int:
        """Returns the number of parameters of the whole model; a tied table counts once."""
        h = self.hidden_size
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        block = sum(w.n * w.k + (w.n if w.bias else 0) for w in self.block_linears)
        block += sum(self.qk_norm_sizes)
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
        attention = self.attention_flops_per_token()
        if whole_attention:
            attention = 2 * 2 * self.attention_size * self.sequence_length
        return 3 * (2 * sum(w.n * w.k for w in self.block_linears) + attention)

    def attention_flops_per_token(self) -> int:
        """Returns the operations of causal attention in forward per token in one block.

        Of blocks with different windows, it returns the mean.
        """
        return 2 * 2 * self.attention_size * self._attended_pairs // (2 * self.sequence_length)

    @cached_property
    def _attended_pairs(self) -> int:
        """Twice the pairs of tokens of a sequence that the mask leaves, the mean of all blocks."""
        length, blocks = self.sequence_length, self.num_layers if self.window else 1
        windows = (min(self.window_of(block) or length, length) for block in range(blocks))
        return sum(length**2 - (length - window) ** 2 for window in windows) // blocks

    def head_flops_per_token(self) -> int:
        """Returns the share of lm_head in flops_per_token."""
        return 3 * 2 * self.head.n * self.head.k


# `axonn-ext train` trains this model if its file does not describe one. Its tokens are bytes.
DEFAULT_MODEL = ModelConfig(256, 256, 4, 4, 256)
