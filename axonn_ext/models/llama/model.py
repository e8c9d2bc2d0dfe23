"""Llama on a grid: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Its public state has the names of Hugging Face's LlamaForCausalLM, where q, k, v, gate and up are
separate weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext.models.transformer import (
    StateNames,
    Transformer,
    fuse_qkv,
    residual_init,
    split_qkv,
)
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
            "mlp.down.": "mlp.down_proj.",
        },
    )

    def add_positions(self) -> None:
        config = self.config
        self.rotary = Rotary(config.head_dim, config.sequence_length, config.rope_theta)

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, eps=self.config.norm_eps, **self._options)

    def make_attention(self) -> Attention:
        config = self.config
        return Attention(
            config.hidden_size, config.num_heads, num_kv_heads=config.kv_heads,
            rotary=self.rotary, heads_over_y=self.parallel.heads_over_y,
            out_init=residual_init(config), **self._linear_options,
        )  # fmt: skip

    def make_mlp(self) -> MLP:
        config = self.config
        return MLP(
            config.hidden_size, config.mlp_size, activation="swiglu",
            out_init=residual_init(config), **self._linear_options,
        )  # fmt: skip

    def to_public(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        public: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.endswith("attention.qkv.weight"):
                start = name.removesuffix("attention.qkv.weight") + "self_attn."
                parts = split_qkv(tensor, self.config)
                for part, piece in zip("qkv", parts, strict=True):
                    public[f"{start}{part}_proj.weight"] = piece
            elif name.endswith("mlp.up.weight"):
                start = name.removesuffix("up.weight")
                gate, up = tensor.unflatten(0, (-1, 2)).unbind(1)
                public[f"{start}gate_proj.weight"] = gate.contiguous()
                public[f"{start}up_proj.weight"] = up.contiguous()
            else:
                public[name] = tensor
        return public

    def to_own(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for i in range(self.config.num_layers):
            start = f"{self.names.body}.{self.names.blocks}.{i}."
            qkv = [f"{start}self_attn.{part}_proj.weight" for part in "qkv"]
            gate_up = [f"{start}mlp.{part}_proj.weight" for part in ("gate", "up")]
            if all(name in state for name in qkv):
                parts = [state.pop(name) for name in qkv]
                state[f"{start}attention.qkv.weight"] = fuse_qkv(parts, self.config)
            if all(name in state for name in gate_up):
                parts = [state.pop(name) for name in gate_up]
                state[f"{start}mlp.up.weight"] = torch.stack(parts, 1).flatten(0, 1)
        return state


MODEL = Llama
