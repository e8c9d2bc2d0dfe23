"""GPT-2 on a grid: learned positions, LayerNorm, GELU, biases.

Its public state has the names and layouts of Hugging Face's GPT2LMHeadModel, whose Conv1D weights
are [in, out] and whose c_attn has all q, then all k, then all v.
"""

from __future__ import annotations

from torch import Tensor, nn

from axonn_ext.models.stored import Stored, qkv_order
from axonn_ext.models.transformer import StateNames, Transformer, residual_init
from axonn_ext.nn import MLP, Attention, Init, LayerNorm, Places, PositionEmbedding

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2(Transformer):
    names = StateNames(
        body="transformer",
        blocks="h",
        norm="ln_f",
        table="wte",
        positions="wpe",
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

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, eps=self.config.norm_eps, **self._options)

    def make_attention(self) -> Attention:
        config = self.config
        return Attention(
            config.hidden_size, config.num_heads, num_kv_heads=config.kv_heads,
            heads_over_y=self.parallel.heads_over_y,
            recompute=self.parallel.recomputation.attention, out_init=residual_init(config),
            **self._linear_options,
        )  # fmt: skip

    def make_mlp(self) -> MLP:
        config = self.config
        out_init = residual_init(config)
        return MLP(
            config.hidden_size, config.mlp_size, activation=config.traits.activation,
            out_init=out_init, **self._linear_options,
        )  # fmt: skip

    def add_positions(self) -> None:
        config = self.config
        options = {k: self._options[k] for k in ("grid", "layout", "seed", "dtype", "device")}
        init = Init.normal(config.init_std)
        self.wpe = PositionEmbedding(
            config.sequence_length, config.hidden_size, offset=config.traits.position_offset,
            init=init, **options,
        )  # fmt: skip

    def embed(self, token_ids: Tensor, table: Tensor | None, places: Places | None) -> Tensor:
        positions = None if places is None else places.positions
        return self.wpe(super().embed(token_ids, table, places), token_ids.shape[1], positions)

    def arranged(self, name: str, public: str, rows: int) -> Stored:
        transposed = public.endswith(TRANSPOSED)
        if ".attn.c_attn." in public:  # all q, then all k, then all v, in one tensor
            return Stored(((public, rows),), qkv_order(self.config), transposed)
        return Stored(((public, rows),), transposed=transposed)


MODEL = GPT2
