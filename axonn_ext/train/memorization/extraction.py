"""Finds the documents that a model repeats when it continues them from all but their end.

Source: the protocol follows Singh et al., arXiv:2502.08145: a document is cut to 2,048 tokens, all
but the last 50 are the prompt, and 50 tokens are generated greedily. A document counts as memorised
if these are its last 50, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.models.generation import generate
from axonn_ext.models.transformer import Transformer
from axonn_ext.ranks.grid import Grid
from axonn_ext.train.memorization.documents import CONTINUED, Document, check_documents
from axonn_ext.train.memorization.measures import edit_distance, longest_common_run

TOKENS_AT_ONCE = 1 << 15  # total of the prompts that are continued together, over all ranks
NO_LABEL = -100


@dataclass(frozen=True)
class Extraction:
    """A document, and the CONTINUED tokens that the model generated from its prompt."""

    document: Document
    found: tuple[int, ...]

    @property
    def matches(self) -> bool:
        """Whether the model reproduced the end of the document, token for token."""
        return self.found == self.document.continuation

    @property
    def edit_distance(self) -> int:
        """Tokens to insert, delete or replace to get the document's end; 0 is a match."""
        return edit_distance(self.found, self.document.continuation)

    @property
    def longest_run(self) -> int:
        """Length in tokens of the longest run in common with the document's end."""
        return longest_common_run(self.found, self.document.continuation)


def extract(
    model: Transformer,
    documents: Sequence[Document],
    *,
    tokens_at_once: int = TOKENS_AT_ONCE,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Extraction]:
    """Continues every document's prompt greedily; returns the results in the documents' order.

    All ranks pass the same arguments and get the same result. Prompts of similar lengths are
    continued together, with a KV cache, up to tokens_at_once tokens (but at least one prompt for
    each (data, z) group). advance: called after each batch with the number of finished documents.
    Collectives: those of `generate`.

    Raises ValueError for a document that has at most CONTINUED tokens, is longer than the model's
    sequences, or has a token that its vocabulary lacks.
    """
    check_documents(documents, model.config.sequence_length, model.config.vocab_size)
    found: dict[int, Extraction] = {}
    for numbers in _batches(documents, model.grid, tokens_at_once):
        prompts = [documents[number].prompt for number in numbers]
        continued = generate(model, prompts, max_new_tokens=CONTINUED)
        for number, tokens in zip(numbers, continued, strict=True):
            found[number] = Extraction(documents[number], tuple(tokens))
        advance(len(numbers))
    return [found[number] for number in range(len(documents))]


@torch.no_grad()
def continuation_loss(
    model: Transformer, documents: Sequence[Document], *, tokens_at_once: int = TOKENS_AT_ONCE
) -> float:
    """Returns the mean loss, in nats, of the documents' last CONTINUED tokens, given the rest.

    All ranks pass the same documents and get the same result. The losses within a batch are summed
    in fp32, the batches in double precision. Collectives: those of the model's `loss`.

    Raises ValueError as `extract` does.
    """
    check_documents(documents, model.config.sequence_length, model.config.vocab_size)
    plain = model.replicated()
    total = 0.0
    for numbers in _batches(documents, model.grid, tokens_at_once):
        tokens, labels = _own_rows([documents[number] for number in numbers], model.grid)
        device = model.table.weight.device
        total += plain.loss(tokens.to(device), labels.to(device), 1.0).item()
    return total / (len(documents) * CONTINUED)


def _batches(documents: Sequence[Document], grid: Grid, tokens_at_once: int) -> Iterator[list[int]]:
    """Yields batches of document numbers, the longest documents first."""
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number].tokens))
    groups = grid.num_parts(("data", "z"))
    first = 0
    while first < len(order):
        longest = len(documents[order[first]].tokens)
        count = max(1, tokens_at_once // (longest * groups)) * groups
        yield order[first : first + count]
        first += count


def _own_rows(documents: Sequence[Document], grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the tokens and labels of this (data, z) group's documents, [B, S] each.

    All groups have the same number of rows, all of one length; padding has no label.
    """
    axes = ("data", "z")
    each = -(-len(documents) // grid.num_parts(axes))
    first = grid.part(axes) * each
    size = (each, max(len(document.tokens) for document in documents) - 1)
    tokens, labels = torch.zeros(size, dtype=torch.int64), torch.full(size, NO_LABEL)
    for row, document in enumerate(documents[first : first + each]):
        end = len(document.tokens) - 1
        tokens[row, :end] = torch.tensor(document.tokens[:-1])
        labels[row, end - CONTINUED : end] = torch.tensor(document.continuation)
    return tokens, labels
