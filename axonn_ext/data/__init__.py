"""Corpora, and batches of their tokens that depend only on the step and are equal on every grid.

IndexedTokens, ArrowTokens and ArrayTokens are streams of tokens, of which `whole` and `split` make
a Part. RandomWindows and ShuffledDocuments are orders of a part's sequences (`source`: the number
of the part in a mixture), and a Mixture is one of several orders'. TrainingBatches makes batches of
an order. For examples, which Prompts encodes, load_examples and PackedBatches do the same.

Names are loaded on first use, since the processes of `axonn-ext tokenize` do not need Torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_ext.data.arrow import ArrowTokens
    from axonn_ext.data.batches import (
        Batch,
        Batches,
        Evaluation,
        EvaluationBatches,
        RowGroup,
        TrainingBatches,
    )
    from axonn_ext.data.corpus import (
        Corpus,
        CorpusOptions,
        Source,
        find_sources,
        load_corpus,
        open_tokens,
        text_bytes,
    )
    from axonn_ext.data.examples import Example, Examples, load_examples, stored_examples
    from axonn_ext.data.indexed import IndexedTokens
    from axonn_ext.data.mixture import Mixture
    from axonn_ext.data.orders import Order, RandomWindows, ShuffledDocuments
    from axonn_ext.data.packed import PackedBatches, PackedEvaluation
    from axonn_ext.data.permutation import Permutation
    from axonn_ext.data.prompts import Prompts
    from axonn_ext.data.source import find_text, python_sources
    from axonn_ext.data.stored import vocabulary_of
    from axonn_ext.data.tokenizing import TextCorpus, Tokenizing
    from axonn_ext.data.tokens import ArrayTokens, Part, Tokens, split, whole
    from axonn_ext.data.vocabulary import (
        ByteVocabulary,
        StoredVocabulary,
        TokenizerVocabulary,
        Vocabulary,
        open_vocabulary,
        padded_size,
    )

_HOMES = {
    "ArrayTokens": "tokens",
    "ArrowTokens": "arrow",
    "Batch": "batches",
    "Batches": "batches",
    "ByteVocabulary": "vocabulary",
    "Corpus": "corpus",
    "CorpusOptions": "corpus",
    "Evaluation": "batches",
    "EvaluationBatches": "batches",
    "Example": "examples",
    "Examples": "examples",
    "IndexedTokens": "indexed",
    "Mixture": "mixture",
    "Order": "orders",
    "PackedBatches": "packed",
    "PackedEvaluation": "packed",
    "Part": "tokens",
    "Permutation": "permutation",
    "Prompts": "prompts",
    "RandomWindows": "orders",
    "RowGroup": "batches",
    "ShuffledDocuments": "orders",
    "Source": "corpus",
    "StoredVocabulary": "vocabulary",
    "TextCorpus": "tokenizing",
    "TokenizerVocabulary": "vocabulary",
    "Tokenizing": "tokenizing",
    "Tokens": "tokens",
    "TrainingBatches": "batches",
    "Vocabulary": "vocabulary",
    "find_sources": "corpus",
    "find_text": "source",
    "load_corpus": "corpus",
    "load_examples": "examples",
    "open_tokens": "corpus",
    "open_vocabulary": "vocabulary",
    "padded_size": "vocabulary",
    "python_sources": "source",
    "split": "tokens",
    "stored_examples": "examples",
    "text_bytes": "corpus",
    "vocabulary_of": "stored",
    "whole": "tokens",
}

__all__ = [
    "ArrayTokens",
    "ArrowTokens",
    "Batch",
    "Batches",
    "ByteVocabulary",
    "Corpus",
    "CorpusOptions",
    "Evaluation",
    "EvaluationBatches",
    "Example",
    "Examples",
    "IndexedTokens",
    "Mixture",
    "Order",
    "PackedBatches",
    "PackedEvaluation",
    "Part",
    "Permutation",
    "Prompts",
    "RandomWindows",
    "RowGroup",
    "ShuffledDocuments",
    "Source",
    "StoredVocabulary",
    "TextCorpus",
    "TokenizerVocabulary",
    "Tokenizing",
    "Tokens",
    "TrainingBatches",
    "Vocabulary",
    "find_sources",
    "find_text",
    "load_corpus",
    "load_examples",
    "open_tokens",
    "open_vocabulary",
    "padded_size",
    "python_sources",
    "split",
    "stored_examples",
    "text_bytes",
    "vocabulary_of",
    "whole",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"axonn_ext.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
