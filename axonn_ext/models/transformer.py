"""What the families share: a block with its residual connections, and a model made of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_ext.grid import Grid
from axonn_ext.nn import MLP, Attention, CrossEntropy, Init
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.nn.sharded import own_rows
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.state import NamedState


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x [m / Gx, H / Gy] (replicated: m rows)."""

    def __init__(
        self, norm_1: nn.Module, attention: Attention, norm_2: nn.Module, mlp: MLP
    ) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = norm_1, attention, norm_2, mlp

    def forward(self, x: Tensor, sequence_length: int) -> Tensor:
        x = x + self.attention(self.norm_1(x), sequence_length)
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module, NamedState):
    """A decoder-only model on a grid. Subclasses define its modules and the names of its state.

    token_ids [B, S]: all sequences of this rank's (data, z) group, equal on every x and y rank.
    """

    config: ModelConfig
    parallel: ParallelConfig
    grid: Grid
    criterion: CrossEntropy

    def forward(self, token_ids: Tensor) -> Tensor:
        """Returns this rank's logits, [m / Gy, V / Gx] (replicated: m rows), m = B * S."""
        raise NotImplementedError

    def loss(
        self, token_ids: Tensor, labels: Tensor, num_labels: Tensor | float | None = None
    ) -> Tensor:
        """Returns the mean loss over the labelled tokens of the global batch, equal on every rank.

        labels: [B, S] like token_ids; -100 means no label. num_labels: the number to divide by;
        default the number of labels of this call on all ranks (see CrossEntropy).
        """
        check_labels(labels, token_ids, self.config, self.grid.rank)
        rows = labels.flatten()
        if self.parallel.layout == "sharded":
            axis = self.grid.axis("y")
            rows = own_rows(rows, axis.rank, axis.size)
        return self.criterion(self(token_ids), rows, num_labels)

    def run_blocks(self, blocks: Iterable[nn.Module], x: Tensor, sequence_length: int) -> Tensor:
        for block in blocks:
            if self.parallel.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, sequence_length, use_reentrant=False)
            else:
                x = block(x, sequence_length)
        return x


def check_token_ids(token_ids: Tensor, config: ModelConfig) -> int:
    """Returns the sequence length S of token_ids [B, S].

    Raises ValueError for any other shape, and where S exceeds the model's sequence_length.
    """
    check_tensor("model", "token_ids", token_ids)
    if token_ids.dim() != 2 or token_ids.shape[1] > config.sequence_length:
        raise ValueError(
            f"token_ids must have shape [sequences, length <= {config.sequence_length}], "
            f"got {list(token_ids.shape)}"
        )
    return token_ids.shape[1]


def check_labels(labels: Tensor, token_ids: Tensor, config: ModelConfig, rank: int) -> None:
    """Raises ValueError for labels of another shape than token_ids.

    On the CPU it also raises ValueError for labels outside of the vocabulary, on every rank that
    has the sequence. The criterion would raise only on the rank that has the row.
    """
    check_tensor("loss", "token_ids", token_ids)
    check_tensor("loss", "labels", labels, token_ids.device)
    if labels.shape != token_ids.shape:
        raise ValueError(
            "loss: labels must have the shape of token_ids, "
            f"{list(token_ids.shape)}, got {list(labels.shape)}"
        )
    if labels.is_cpu:
        size = config.vocab_size
        torch.ops.axonn.local_rows(labels, 0, size, size, IGNORE_INDEX, True, "loss: labels", rank)


def residual_init(config: ModelConfig) -> Init:
    """Returns the initial values of the Linears whose outputs are added to the residual stream.

    As in GPT-2, they are scaled by 1 / sqrt(the number of such outputs).
    """
    return Init.normal(config.init_std / (2 * config.num_layers) ** 0.5)


# The functions below convert whole tensors between a fused weight and its separate parts.


def split_qkv(fused: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a fused weight, whose rows are [q.., k, v] for each key-value head, into (q, k, v)."""
    q_per_kv = config.num_heads // config.kv_heads
    groups = fused.unflatten(0, (config.kv_heads, q_per_kv + 2, config.head_dim))
    q, k, v = groups.split((q_per_kv, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def fuse_qkv(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Returns the fused weight of (q, k, v), the reverse of `split_qkv`."""
    heads = (t.unflatten(0, (config.kv_heads, -1, config.head_dim)) for t in parts)
    return torch.cat(list(heads), dim=1).flatten(0, 2)


def drop_tied_head(state: dict[str, Tensor], table_name: str) -> None:
    """Removes the head from the state. Raises ValueError if it differs from the tied table."""
    head = state.pop("lm_head.weight")
    if not torch.equal(head, state[table_name]):
        raise ValueError(
            f"load_full_state_dict: lm_head.weight differs from {table_name}, but the model ties "
            "them; build it with tie_embeddings=False"
        )


def rename(state: dict[str, Tensor], name_of: Callable[[str], str]) -> dict[str, Tensor]:
    return {name_of(name): tensor for name, tensor in state.items()}
