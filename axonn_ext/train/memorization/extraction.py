"""Finds the documents that a model repeats when it continues them from all but their end.

Source: the protocol follows Singh et al., arXiv:2502.08145: a document is cut to 2,048 tokens, all
but the last 50 are the prompt, and 50 tokens are generated greedily. A document counts as memorised
if these are its last 50, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axonn_ext.models.generation import generate, score
from axonn_ext.models.generation.scoring import batches
from axonn_ext.models.transformer import Transformer
from axonn_ext.train.memorization.documents import CONTINUED, Document, check_documents
from axonn_ext.train.memorization.measures import edit_distance, longest_common_run

TOKENS_AT_ONCE = 1 << 15  # total of the prompts that are continued together, over all ranks


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
    groups = model.grid.num_parts(("data", "z"))
    lengths = [len(document.tokens) for document in documents]
    for numbers in batches(lengths, groups, tokens_at_once // groups):
        prompts = [documents[number].prompt for number in numbers]
        continued = generate(model, prompts, max_new_tokens=CONTINUED)
        for number, tokens in zip(numbers, continued, strict=True):
            found[number] = Extraction(documents[number], tuple(tokens))
        advance(len(numbers))
    return [found[number] for number in range(len(documents))]


def continuation_loss(
    model: Transformer, documents: Sequence[Document], *, tokens_at_once: int = TOKENS_AT_ONCE
) -> float:
    """Returns the mean loss, in nats, of the documents' last CONTINUED tokens, given the rest.

    All ranks pass the same documents and get the same result. dtypes and collectives: those of
    `score`.

    Raises ValueError as `extract` does.
    """
    check_documents(documents, model.config.sequence_length, model.config.vocab_size)
    scores = score(
        model, [document.tokens for document in documents], [CONTINUED] * len(documents),
        tokens_at_once=tokens_at_once // model.grid.num_parts(("data", "z")),
    )  # fmt: skip
    return -sum(each.log_probability for each in scores) / (len(documents) * CONTINUED)
