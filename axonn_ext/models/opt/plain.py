"""OPT in plain torch.nn, with the names of Hugging Face's OPTForCausalLM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.models import plain
from axonn_ext.models.plain import merge_heads, split_heads
from axonn_ext.spec.model import ModelConfig


class Body(plain.Body):
    """The body has learned positions, pre-norm blocks and a final LayerNorm."""

    name, table_name = "model", "decoder.embed_tokens"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.decoder = Decoder(config)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.decoder(token_ids)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.offset = config.traits.position_offset
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.num_positions, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device) + self.offset
        x = self.embed_tokens(token_ids) + self.embed_positions(positions)
        for block in self.layers:
            x = block(x)
        return self.final_layer_norm(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.fc1 = nn.Linear(config.hidden_size, config.mlp_size)
        self.fc2 = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        size = config.hidden_size
        self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
        self.v_proj, self.out_proj = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            split_heads(part(x), self.num_heads) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
