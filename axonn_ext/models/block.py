"""A block of a decoder-only model, with its residual connections, for all families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from axonn_ext.nn import (
    MLP,
    Attention,
    Init,
    KeyValueCache,
    LayerNorm,
    Linear,
    Places,
    RMSNorm,
    Rotary,
)
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig

NOT_HELD = (None,) * 4


class Block(nn.Module):
    """Adds attention and MLP to the residual stream x [m / Gx, H / Gy] (replicated: m rows).

        x + s * after_1(attention(norm_1(x))), then the same with after_2, mlp and norm_2
        parallel: x + s * attention(norm_1(x)) + s * mlp(norm_2(x)); without norm_2 of norm_1(x)

    s is the model's residual_scale. A family has some of the norms (Family.norms).
    """

    def __init__(
        self, config: ModelConfig, attention: Attention, mlp: MLP, norms: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.parallel, self.residual_scale = config.traits.parallel, config.residual_scale
        # The order of the modules is that of the parameters in buckets of gradients.
        self.norm_1 = norms.get("norm_1")
        self.attention = attention
        self.after_1 = norms.get("after_1")
        self.norm_2 = norms.get("norm_2")
        self.mlp = mlp
        self.after_2 = norms.get("after_2")

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The Linears in the order of their use."""
        return self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down

    def forward(
        self,
        x: Tensor,
        sequence_length: int,
        places: Places | None = None,
        cache: KeyValueCache | None = None,
        held: Sequence[Tensor | None] = NOT_HELD,
    ) -> Tensor:
        """held: the weights of `linears`, as nn.Linear takes them."""
        first = _applied(self.norm_1, x)
        attended = self.attention(first, sequence_length, places, cache, held[:2])
        attended = _applied(self.after_1, attended)
        attended = x + scaled(attended, self.residual_scale)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
        else:
            second = _applied(self.norm_2, attended)
        return attended + scaled(
            _applied(self.after_2, self.mlp(second, held[2:])), self.residual_scale
        )


def _applied(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns x * factor."""
    return x if factor == 1 else x * factor


def make_block(
    config: ModelConfig,
    number: int,
    parallel: ParallelConfig,
    rotary: Rotary | None,
    options: Mapping[str, Any],
) -> Block:
    """Returns a block of the model, by its number. rotary: None for a block that does not rotate.

    options: grid, layout, algorithm, seed, dtype and device of all its modules.
    """
    traits = config.traits
    linears = linear_options(config, parallel, options)
    # As in GPT-2, the Linears whose outputs are added to the residual stream start with values
    # scaled by 1 / sqrt(the number of such outputs).
    out_init = Init.normal(config.init_std / (2 * config.num_layers) ** 0.5)
    attention = Attention(
        config.hidden_size, config.num_heads, num_kv_heads=config.kv_heads,
        head_dim=config.head_dim, rotary=rotary, scale=config.attention_scale,
        window=config.window_of(number), softcap=config.attention_softcap, qk_norm=traits.qk_norm,
        norm_eps=config.norm_eps, norm_plus_one=traits.norm.plus_one,
        heads_over_y=parallel.heads_over_y, recompute=parallel.recomputation.attention,
        bias="qkv" in config.biased, out_bias="out" in config.biased, out_init=out_init, **linears,
    )  # fmt: skip
    mlp = MLP(
        config.hidden_size, config.mlp_size, activation=traits.activation,
        bias="up" in config.biased, out_bias="down" in config.biased, out_init=out_init, **linears,
    )  # fmt: skip
    norms = {name: make_norm(config, options) for name in traits.norms}
    return Block(config, attention, mlp, norms)


def make_norm(config: ModelConfig, options: Mapping[str, Any]) -> nn.Module:
    """Returns a norm over the residual stream."""
    traits = config.traits
    if not traits.norm.centred:
        plus_one = traits.norm.plus_one
        return RMSNorm(config.hidden_size, eps=config.norm_eps, plus_one=plus_one, **options)
    bias = traits.norm.num_vectors == 2
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=bias, **options)


def linear_options(
    config: ModelConfig, parallel: ParallelConfig, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options of a Linear."""
    return dict(options) | {
        "save_gathered": parallel.save_gathered,
        "reshard_after_forward": parallel.reshard_after_forward,
        "init": Init.normal(config.init_std),
    }
