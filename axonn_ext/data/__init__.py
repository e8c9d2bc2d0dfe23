"""Turns text into batches of tokens, which depend only on the step and are equal on every grid."""

from __future__ import annotations

from axonn_ext.data.batches import EvaluationBatches, RowGroup, TrainingBatches
from axonn_ext.data.corpus import Corpus, load_corpus, split_tokens, text_bytes
from axonn_ext.data.source import find_text, python_sources
from axonn_ext.data.vocabulary import (
    ByteVocabulary,
    TokenizerVocabulary,
    Vocabulary,
    open_vocabulary,
    padded_size,
)

__all__ = [
    "ByteVocabulary",
    "Corpus",
    "EvaluationBatches",
    "RowGroup",
    "TokenizerVocabulary",
    "TrainingBatches",
    "Vocabulary",
    "find_text",
    "load_corpus",
    "open_vocabulary",
    "padded_size",
    "python_sources",
    "split_tokens",
    "text_bytes",
]
