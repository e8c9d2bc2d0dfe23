"""GPT-2 on a grid: learned positions, LayerNorm, GELU, biases.

Its public state has the names and layouts of Hugging Face's GPT2LMHeadModel, whose Conv1D weights
are [in, out] and whose c_attn holds first all q, then all k, then all v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext.grid import Grid
from axonn_ext.models.transformer import (
    Block,
    StateNames,
    Transformer,
    fuse_qkv,
    residual_init,
    split_qkv,
)
from axonn_ext.nn import MLP, Attention, Init, LayerNorm, PositionEmbedding
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2(Transformer):
    names = StateNames(
        body="transformer",
        blocks="h",
        norm="ln_f",
        table="wte",
        block={
            "norm_1.": "ln_1.",
            "norm_2.": "ln_2.",
            "attention.qkv.": "attn.c_attn.",
            "attention.out.": "attn.c_proj.",
            "mlp.up.": "mlp.c_fc.",
            "mlp.down.": "mlp.c_proj.",
        },
        own_table="wte",
    )

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        parallel: ParallelConfig,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, grid, parallel, dtype=dtype)
        options, linear = self._options, self._linear_options
        h, eps, out_init = config.hidden_size, config.norm_eps, residual_init(config)
        self.add_embedding()
        self.wpe = PositionEmbedding(
            config.sequence_length, h, grid=grid, layout=parallel.layout,
            init=Init.normal(config.init_std), seed=None, dtype=dtype,
        )  # fmt: skip
        self.blocks = nn.ModuleList(
            Block(
                LayerNorm(h, eps=eps, **options),
                Attention(
                    h, config.num_heads, num_kv_heads=config.kv_heads,
                    heads_over_y=parallel.heads_over_y, out_init=out_init, **linear,
                ),
                LayerNorm(h, eps=eps, **options),
                MLP(h, config.mlp_size, out_init=out_init, **linear),
            )
            for _ in range(config.num_layers)
        )  # fmt: skip
        self.add_head(LayerNorm(h, eps=eps, **options))

    def embed(self, token_ids: Tensor, table: Tensor | None, length: int) -> Tensor:
        return self.wpe(super().embed(token_ids, table, length), length)

    def to_public(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in list(state):
            if ".attn.c_attn." in name:
                state[name] = torch.cat(split_qkv(state[name], self.config))
            if name.endswith(TRANSPOSED):
                state[name] = state[name].t().contiguous()
        return state

    def to_own(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in list(state):
            if name.endswith(TRANSPOSED):
                state[name] = state[name].t()
            if ".attn.c_attn." in name:
                state[name] = fuse_qkv(state[name].chunk(3), self.config)
        return state


MODEL = GPT2
