"""Checks of a model's arguments, on every rank that has the sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.spec.model import ModelConfig


def check_token_ids(token_ids: Tensor, config: ModelConfig) -> int:
    """Returns the sequence length S of token_ids [B, S].

    Raises ValueError for any other shape, or if S is 0 or exceeds the model's sequence_length.
    """
    check_tensor("model", "token_ids", token_ids)
    if token_ids.dim() != 2 or not 1 <= token_ids.shape[1] <= config.sequence_length:
        raise ValueError(
            f"token_ids must have shape [sequences, length], 1 <= length <= "
            f"{config.sequence_length}, got {list(token_ids.shape)}"
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
