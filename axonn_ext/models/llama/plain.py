"""Llama in plain torch.nn, with the names of Hugging Face's LlamaForCausalLM.

Legend: B sequences of S tokens, H hidden features, D features of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.models import plain
from axonn_ext.models.plain import merge_heads, split_heads
from axonn_ext.spec.model import ModelConfig, RopeScaling


class Body(plain.Body):
    """The body has rotary positions, pre-norm blocks and a final RMSNorm."""

    name, table_name = "model", "embed_tokens"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embed_tokens(token_ids)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.config = config
        self.head_dim = config.head_dim
        features, bias = config.attention_size, config.traits.has_qkv_bias
        kv_features = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, features, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_features, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_features, bias=bias)
        self.o_proj = nn.Linear(features, config.hidden_size, bias=False)
        if config.traits.has_head_norms:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_kv_heads)
        v = split_heads(self.v_proj(x), self.num_kv_heads)
        if self.config.traits.has_head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = _rotary_tables(x.shape[1], self.config, x)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(merge_heads(out))


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotary_tables(length: int, config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [S, D] of the angles of each position, in the dtype of `like`."""
    pairs = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float64)
    frequencies = torch.exp(-math.log(config.rope_theta) * pairs / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    positions = torch.arange(length, device=like.device, dtype=torch.float64)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Applies Llama 3's scaling, case by case as in transformers."""
    lengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    scaled = frequencies / scaling.factor
    share = scaling.original_max_position_embeddings / lengths - scaling.low_freq_factor
    share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - share) * scaled + share * frequencies
    result = torch.where(lengths > longest, scaled, between)
    return torch.where(lengths < shortest, frequencies, result)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates feature i of a head against feature i + D/2 (Hugging Face's rotate-half order)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
