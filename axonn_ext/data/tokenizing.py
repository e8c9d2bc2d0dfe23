"""Turns a corpus of text into token files, the same bytes with any number of processes.

Each process encodes units of the text (see `units`); this process writes them in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.index_writer import MOST_TOKENS, IndexedWriter, dtype_for
from axonn_ext.data.processes import ordered_results
from axonn_ext.data.source import find_text
from axonn_ext.data.units import Unit, find_units, read_unit
from axonn_ext.data.vocabulary import ByteVocabulary, TokenArray, Vocabulary, open_vocabulary
from axonn_ext.spec.files.token_files import FORMAT, TokenFiles


@dataclass(frozen=True)
class TextCorpus:
    """The text to tokenize, and how.

    text           a file or a folder      field      of .jsonl files, with the document
    vocabulary     "bytes", or a JSON file of the tokenizers library
    append_id      a token appended to each document; None: none
    """

    text: str
    vocabulary: str = "bytes"
    field: str = "text"
    append_id: int | None = None


@dataclass(frozen=True)
class Encoded:
    """The tokens of a unit, one document after the other.

    lengths    of the documents; the first may have begun in an earlier unit
    open       whether the last document continues in a later unit
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    open: bool
    num_bytes: int


class Tokenizing:
    """A corpus that is ready to be tokenized.

    Raises: ValueError for an invalid text, vocabulary or append_id.
    """

    def __init__(self, corpus: TextCorpus) -> None:
        self._vocabulary = open_vocabulary(corpus.vocabulary)
        most = self._vocabulary.num_tokens - 1
        if corpus.append_id is not None and not 0 <= corpus.append_id <= most:
            raise ValueError(
                f"append_id must be a token of {corpus.vocabulary}, 0 to {most}, got "
                f"{corpus.append_id}"
            )
        self._corpus = corpus
        self.files = find_text(corpus.text)
        self._units = find_units(self.files, corpus.field)
        self.num_bytes = sum(unit.num_bytes for unit in self._units)
        if not self.num_bytes:
            raise ValueError(f"the text {corpus.text} is empty")

    def write(
        self, files: TokenFiles, *, processes: int = 1, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        """Writes the token files, and returns their description.

        advance: called with the number of bytes of text done.

        Raises: ValueError for a line without a document, or a text without tokens; OSError.
        """
        dtype = dtype_for(self._vocabulary.num_tokens)
        open_work = partial(_open_work, self._corpus, dtype.str)
        results = ordered_results(open_work, self._units, processes=processes)
        largest = 0
        with IndexedWriter(files, dtype) as writer, closing(results):
            for tokens, lengths, num_bytes in _whole_documents(results):
                writer.add(tokens, lengths)
                largest = max(largest, int(tokens.max()) if len(tokens) else 0)
                advance(num_bytes)
            if not writer.num_documents:
                raise ValueError(f"the text {self._corpus.text} has no tokens")
            description = self._describe(writer, largest)
            writer.finish(description)
        return description

    def _describe(self, writer: IndexedWriter, largest: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "vocabulary": self._corpus.vocabulary,
            "vocabulary_size": self._vocabulary.num_tokens,
            "vocabulary_sha256": self._vocabulary.sha256,
            "append_id": self._corpus.append_id,
            "largest_token": largest,
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "text_bytes": self.num_bytes,
        }


def _whole_documents(
    results: Iterator[Encoded],
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], int]]:
    """Yields tokens, the lengths of the documents that end among them, and the bytes of text.

    Documents without tokens are left out.
    """
    begun = 0  # tokens of the unfinished document
    for each in results:
        lengths = each.lengths
        if len(lengths):
            lengths = lengths.copy()
            lengths[0] += begun
            begun = int(lengths[-1]) if each.open else 0
            if int(lengths.max()) > MOST_TOKENS:
                raise ValueError(f"a document has more than {MOST_TOKENS:,} tokens; cut it in two")
            lengths = lengths[: len(lengths) - each.open]
        yield each.tokens, lengths[lengths > 0], each.num_bytes


def _open_work(corpus: TextCorpus, dtype: str) -> Callable[[Unit], Encoded]:
    """Returns the function that a process runs for each unit."""
    # The library starts threads, which would compete with the other processes. It reads this
    # variable natively, so putenv is needed.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    return partial(_encode, open_vocabulary(corpus.vocabulary), np.dtype(dtype), corpus.append_id)


def _encode(
    vocabulary: Vocabulary, dtype: np.dtype[Any], append_id: int | None, unit: Unit
) -> Encoded:
    try:
        pieces = list(read_unit(unit, any_bytes=isinstance(vocabulary, ByteVocabulary)))
    except OSError as error:
        raise ValueError(f"cannot read the text: {error.strerror or error}") from None
    encoded = vocabulary.encode_all([piece.text for piece in pieces])
    parts: list[TokenArray] = []
    lengths, length = [], 0
    for piece, tokens in zip(pieces, encoded, strict=True):
        parts.append(tokens)
        length += len(tokens)
        if piece.ends:
            if append_id is not None and (length or not piece.begins):
                parts.append(np.array([append_id], dtype=tokens.dtype))
                length += 1
            lengths.append(length)
            length = 0
    is_open = bool(pieces) and not pieces[-1].ends
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    if len(tokens) and int(tokens.max()) >= vocabulary.num_tokens:
        raise ValueError(
            f"the tokenizer gave token {int(tokens.max())}, but it has {vocabulary.num_tokens}"
        )
    all_lengths = np.array([*lengths, *([length] if is_open else [])], dtype=np.int64)
    return Encoded(tokens.astype(dtype, copy=False), all_lengths, is_open, unit.num_bytes)
