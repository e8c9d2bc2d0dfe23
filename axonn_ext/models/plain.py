"""A model in plain torch.nn for one process: the reference for the results of every grid.

The names and layouts of its state dict are those of the family's Hugging Face model. It loads the
`axonn_ext.full_state_dict` of a model on any grid, and such a model loads its state dict.

B sequences of S tokens, D features of a head.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.spec.model import ModelConfig

IGNORED_LABEL = -100


class Body(nn.Module):
    """The layers before lm_head.

    `name` and `table_name` are the names of the body and of its embedding in the state dict.
    """

    name: str
    table_name: str


class PlainTransformer(nn.Module):
    """A language model in one process; plain.py of its family has the body."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        modules = import_module(f"axonn_ext.models.{config.traits.modules}.plain")
        body: Body = modules.Body(config)
        self._body_name = body.name
        self.add_module(body.name, body)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tie_embeddings:
            table = body.get_submodule(body.table_name)
            assert isinstance(table, nn.Embedding)
            self.lm_head.weight = table.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Returns logits [B, S, V] for token ids [B, S]."""
        return self.lm_head(self.get_submodule(self._body_name)(token_ids))

    def loss(
        self, token_ids: Tensor, labels: Tensor, num_labels: float | Tensor | None = None
    ) -> Tensor:
        """Returns the cross-entropy, summed over labelled tokens and divided by `num_labels`.

        num_labels: default the number of labelled tokens of this call. Tokens with the label -100
        are not counted. The loss is computed in fp32 (fp64 for fp64).
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
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:  # a matrix, or a table
            nn.init.normal_(weight, std=self.config.init_std)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, heads D] -> [B, heads, S, D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, S, D] -> [B, S, heads D]."""
    return x.transpose(1, 2).flatten(2)
