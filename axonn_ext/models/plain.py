"""The two models in plain torch.nn, for one process: the reference that every grid must equal.

Names and layouts of the state dict are exactly those of Hugging Face's GPT2LMHeadModel and
LlamaForCausalLM, so `axonn_ext.full_state_dict` of a model on any grid loads here, and the reverse.

B sequences of S tokens, H hidden features, D features of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.models.config import ModelConfig

IGNORED_LABEL = -100


class PlainTransformer(nn.Module):
    """A GPT-2 or Llama language model whose weights lie in one process."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        if config.family == "gpt2":
            self.transformer = Gpt2Body(config)
            table = self.transformer.wte
        else:
            self.model = LlamaBody(config)
            table = self.model.embed_tokens
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tie_embeddings:
            self.lm_head.weight = table.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits [B, S, V] of token ids [B, S]."""
        body = self.transformer if self.config.family == "gpt2" else self.model
        return self.lm_head(body(token_ids))

    def loss(
        self, token_ids: Tensor, labels: Tensor, num_labels: float | Tensor | None = None
    ) -> Tensor:
        """Cross-entropy summed over labelled tokens, over `num_labels` (default: their number).

        Labels of -100 are left out. Computed in fp32 (fp64 for fp64).
        """
        logits = self(token_ids).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if num_labels is None:
            num_labels = (labels != IGNORED_LABEL).sum()
        return total / num_labels

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            nn.init.normal_(module.weight, std=self.config.init_std)


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight lies transposed: [in_features, out_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Gpt2Body(nn.Module):
    """Learned positions, pre-norm blocks, a final LayerNorm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.sequence_length, config.hidden_size)
        self.h = nn.ModuleList(Gpt2Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.wte(token_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Gpt2Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Gpt2Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Gpt2Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split_heads(t, self.num_heads) for t in self.c_attn(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(_merge_heads(out))


class Gpt2Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.mlp_size)
        self.c_proj = Conv1D(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class LlamaBody(nn.Module):
    """Rotary positions, pre-norm blocks, a final RMSNorm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embed_tokens(token_ids)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = LlamaMlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.rope_theta = config.rope_theta
        self.head_dim = config.head_dim
        kv_features = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_features, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_features, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = _split_heads(self.q_proj(x), self.num_heads)
        k = _split_heads(self.k_proj(x), self.num_kv_heads)
        v = _split_heads(self.v_proj(x), self.num_kv_heads)
        cos, sin = _rotary_tables(x.shape[1], self.head_dim, self.rope_theta, x)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(_merge_heads(out))


class LlamaMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, heads D] -> [B, heads, S, D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """[B, heads, S, D] -> [B, S, heads D]."""
    return x.transpose(1, 2).flatten(2)


def _rotary_tables(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [S, D] of each position's angles, in the dtype of `like`."""
    pairs = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float64)
    frequencies = torch.exp(-math.log(theta) * pairs / head_dim)
    positions = torch.arange(length, device=like.device, dtype=torch.float64)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates feature i of a head against feature i + D/2 (Hugging Face's rotate-half order)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
