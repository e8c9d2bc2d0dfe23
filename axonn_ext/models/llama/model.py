"""Llama on a grid: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Its public state has the names of Hugging Face's LlamaForCausalLM, where q, k, v, gate and up are
separate weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.grid import Grid
from axonn_ext.models.transformer import (
    Block,
    Transformer,
    check_token_ids,
    drop_tied_head,
    fuse_qkv,
    rename,
    residual_init,
    split_qkv,
)
from axonn_ext.nn import MLP, Attention, CrossEntropy, Embedding, Init, Linear, RMSNorm, Rotary
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig

# Our name -> Hugging Face's name, within a block.
BLOCK_NAMES = {
    "norm_1.": "input_layernorm.",
    "norm_2.": "post_attention_layernorm.",
    "attention.out.": "self_attn.o_proj.",
    "mlp.down.": "mlp.down_proj.",
}


class Llama(Transformer):
    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        parallel: ParallelConfig,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.grid, self.parallel = config, grid, parallel
        common: dict[str, Any] = {
            "grid": grid,
            "layout": parallel.layout,
            "algorithm": parallel.algorithm,
        }
        options = common | {"seed": None, "dtype": dtype}
        linear = options | {
            "save_gathered": parallel.save_gathered,
            "reshard_after_forward": parallel.reshard_after_forward,
            "init": Init.normal(config.init_std),
            "bias": False,
        }
        h, eps, out_init = config.hidden_size, config.norm_eps, residual_init(config)
        self.embedding = Embedding(
            config.vocab_size, h, init=Init.normal(config.init_std), **options
        )
        rotary = Rotary(config.head_dim, config.sequence_length, config.rope_theta)
        self.blocks = nn.ModuleList(
            Block(
                RMSNorm(h, eps=eps, **options),
                Attention(
                    h, config.num_heads, num_kv_heads=config.kv_heads, rotary=rotary,
                    heads_over_y=parallel.heads_over_y, out_init=out_init, **linear,
                ),
                RMSNorm(h, eps=eps, **options),
                MLP(h, config.mlp_size, activation="swiglu", out_init=out_init, **linear),
            )
            for _ in range(config.num_layers)
        )  # fmt: skip
        self.norm = RMSNorm(h, eps=eps, **options)
        self.lm_head = Linear(h, config.vocab_size, role="expand", **linear)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.criterion = CrossEntropy(**common)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = check_token_ids(token_ids, self.config)
        table = self.embedding.gather_weight() if self.config.tie_embeddings else None
        x = self.run_blocks(self.blocks, self.embedding(token_ids, table), length)
        return self.lm_head(self.norm(x), table)

    def export_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        public: dict[str, Tensor] = {}
        for name, tensor in rename(state, _public_name).items():
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
        if self.config.tie_embeddings and "model.embed_tokens.weight" in public:
            public["lm_head.weight"] = public["model.embed_tokens.weight"]
        return public

    def import_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_embeddings:
            drop_tied_head(state, "model.embed_tokens.weight")
        for i in range(self.config.num_layers):
            start = f"model.layers.{i}."
            qkv = [f"{start}self_attn.{part}_proj.weight" for part in "qkv"]
            gate_up = [f"{start}mlp.{part}_proj.weight" for part in ("gate", "up")]
            if all(name in state for name in qkv):
                parts = [state.pop(name) for name in qkv]
                state[f"{start}attention.qkv.weight"] = fuse_qkv(parts, self.config)
            if all(name in state for name in gate_up):
                parts = [state.pop(name) for name in gate_up]
                state[f"{start}mlp.up.weight"] = torch.stack(parts, 1).flatten(0, 1)
        return rename(state, _own_name)


MODEL = Llama


def _public_name(name: str) -> str:
    for ours, theirs in BLOCK_NAMES.items():
        name = name.replace(ours, theirs)
    if name.startswith("blocks."):
        return "model.layers." + name.removeprefix("blocks.")
    if name.startswith("embedding."):
        return "model.embed_tokens." + name.removeprefix("embedding.")
    return name if name.startswith("lm_head.") else "model." + name


def _own_name(name: str) -> str:
    for ours, theirs in BLOCK_NAMES.items():
        name = name.replace(theirs, ours)
    name = name.replace("model.layers.", "blocks.").replace("model.embed_tokens.", "embedding.")
    return name.removeprefix("model.")
