"""Llama on a grid: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Its public state has the names of Hugging Face's LlamaForCausalLM, where q, k, v, gate and up are
separate weights.
"""

from __future__ import annotations

from torch import nn

from axonn_ext.models.stored import Stored, gate_up_order, separate_qkv
from axonn_ext.models.transformer import StateNames, Transformer, residual_init
from axonn_ext.nn import MLP, Attention, RMSNorm, Rotary


class Llama(Transformer):
    names = StateNames(
        body="model",
        blocks="layers",
        norm="norm",
        table="embed_tokens",
        block={
            "norm_1.": "input_layernorm.",
            "norm_2.": "post_attention_layernorm.",
            "attention.out.": "self_attn.o_proj.",
            "attention.q_norm.": "self_attn.q_norm.",
            "attention.k_norm.": "self_attn.k_norm.",
            "mlp.down.": "mlp.down_proj.",
        },
    )

    def add_positions(self) -> None:
        config = self.config
        self.rotary = Rotary(
            config.head_dim,
            config.sequence_length,
            config.rope_theta,
            scaling=config.rope_scaling,
        )

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, eps=self.config.norm_eps, **self._options)

    def make_attention(self) -> Attention:
        config, traits = self.config, self.config.traits
        options = self._linear_options | {"bias": traits.has_biases or traits.has_qkv_bias}
        return Attention(
            config.hidden_size, config.num_heads, num_kv_heads=config.kv_heads,
            head_dim=config.head_dim, rotary=self.rotary, heads_over_y=self.parallel.heads_over_y,
            recompute=self.parallel.recomputation.attention,
            head_norm_eps=config.norm_eps if traits.has_head_norms else None,
            out_bias=traits.has_biases, out_init=residual_init(config), **options,
        )  # fmt: skip

    def make_mlp(self) -> MLP:
        config = self.config
        return MLP(
            config.hidden_size, config.mlp_size, activation=config.traits.activation,
            out_init=residual_init(config), **self._linear_options,
        )  # fmt: skip

    def arranged(self, name: str, public: str, rows: int) -> Stored:
        config = self.config
        start, _, part = public.rpartition(".")
        if ".attention.qkv." in name:
            return separate_qkv(public, config)
        if name.endswith(".mlp.up.weight"):
            start = start.removesuffix("up")
            parts = tuple((f"{start}{p}_proj.{part}", config.mlp_size) for p in ("gate", "up"))
            return Stored(parts, gate_up_order(config.mlp_size))
        return super().arranged(name, public, rows)


MODEL = Llama
