"""GPT-2 on a grid: learned positions, LayerNorm, GELU, biases.

Its public state has the names and layouts of Hugging Face's GPT2LMHeadModel, whose Conv1D weights
are [in, out] and whose c_attn holds first all q, then all k, then all v.
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
from axonn_ext.nn import (
    MLP,
    Attention,
    CrossEntropy,
    Embedding,
    Init,
    LayerNorm,
    Linear,
    PositionEmbedding,
)
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig

# Our name -> Hugging Face's name, within a block.
BLOCK_NAMES = {
    "norm_1.": "ln_1.",
    "norm_2.": "ln_2.",
    "attention.qkv.": "attn.c_attn.",
    "attention.out.": "attn.c_proj.",
    "mlp.up.": "mlp.c_fc.",
    "mlp.down.": "mlp.c_proj.",
}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2(Transformer):
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
        }
        h, eps, out_init = config.hidden_size, config.norm_eps, residual_init(config)
        init = Init.normal(config.init_std)
        self.wte = Embedding(config.vocab_size, h, init=init, **options)
        self.wpe = PositionEmbedding(
            config.sequence_length, h, grid=grid, layout=parallel.layout, init=init, seed=None,
            dtype=dtype,
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
        self.norm = LayerNorm(h, eps=eps, **options)
        self.lm_head = Linear(h, config.vocab_size, role="expand", bias=False, **linear)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.criterion = CrossEntropy(**common)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = check_token_ids(token_ids, self.config)
        table = self.wte.gather_weight() if self.config.tie_embeddings else None
        x = self.wpe(self.wte(token_ids, table), length)
        x = self.run_blocks(self.blocks, x, length)
        return self.lm_head(self.norm(x), table)

    def export_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = rename(state, _public_name)
        for name in list(state):
            if ".attn.c_attn." in name:
                state[name] = torch.cat(split_qkv(state[name], self.config))
            if name.endswith(TRANSPOSED):
                state[name] = state[name].t().contiguous()
        if self.config.tie_embeddings and "transformer.wte.weight" in state:
            state["lm_head.weight"] = state["transformer.wte.weight"]
        return state

    def import_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_embeddings:
            drop_tied_head(state, "transformer.wte.weight")
        for name in list(state):
            if name.endswith(TRANSPOSED):
                state[name] = state[name].t()
            if ".attn.c_attn." in name:
                state[name] = fuse_qkv(state[name].chunk(3), self.config)
        return rename(state, _own_name)


MODEL = GPT2


def _public_name(name: str) -> str:
    for ours, theirs in BLOCK_NAMES.items():
        name = name.replace(ours, theirs)
    if name.startswith("blocks."):
        return "transformer.h." + name.removeprefix("blocks.")
    if name.startswith("norm."):
        return "transformer.ln_f." + name.removeprefix("norm.")
    return name if name.startswith("lm_head.") else "transformer." + name


def _own_name(name: str) -> str:
    for ours, theirs in BLOCK_NAMES.items():
        name = name.replace(theirs, ours)
    name = name.replace("transformer.h.", "blocks.").replace("transformer.ln_f.", "norm.")
    return name.removeprefix("transformer.")
