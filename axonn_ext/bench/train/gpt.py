"""GPT-2 as a user of plain torch would write it, to measure torch's own methods.

`models.plain` has the layers of Hugging Face's GPT-2. torch's tensor parallelism does not support
its Conv1D, which also adds the bias in a separate op. Here every matrix is an `nn.Linear`. Names
and layouts are those of our GPT-2, where the rows of qkv are grouped by head and can be split.

B sequences of S tokens, H hidden features, D features of a head; T of S positions, T = S unless
tensor parallelism splits the sequence between the layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from axonn_ext.spec.model import ModelConfig


class TorchGPT(nn.Module):
    """A model that returns logits [B, S, V] for token ids [B, S]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.norm_eps
        self.wte = nn.Embedding(config.vocab_size, h)
        self.wpe = nn.Embedding(config.sequence_length, h)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(h, eps=eps)
        self.lm_head = nn.Linear(h, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """positions [T]: the positions of the rows that `wte` returns on this rank."""
        x = self.wte(token_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.norm_eps
        self.norm_1 = nn.LayerNorm(h, eps=eps)
        self.attention = _Attention(config)
        self.norm_2 = nn.LayerNorm(h, eps=eps)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, config.qkv_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # [B, S, heads, 3, D]
        q, k, v = (t.transpose(1, 2) for t in heads.unbind(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.mlp_size)
        self.down = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


@torch.no_grad()
def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies each parameter, or this rank's shard, from whole tensors, without communication."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != state.keys():
        raise ValueError(f"state must have {sorted(parameters)}, got {sorted(state)}")
    for name, parameter in parameters.items():
        whole = state[name]
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(whole)
