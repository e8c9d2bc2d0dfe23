"""Reads all tokens of a text, and holds out a part of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_ext.data.source import DEFAULT_TEXT_BYTES, find_text, read_documents
from axonn_ext.data.vocabulary import TokenArray, Vocabulary


@dataclass(frozen=True)
class Corpus:
    """The token ids of a text, split into one array for training and one that is held out."""

    train: TokenArray
    held_out: TokenArray
    num_files: int
    num_bytes: int


def load_corpus(
    path: str, vocabulary: Vocabulary, *, held_out: float = 0.05, max_bytes: int = 0
) -> Corpus:
    """Reads the text at `path` ("": Python's own sources) as one stream of tokens.

    At most `max_bytes` are read; 0 means all of a text that is named, and `DEFAULT_TEXT_BYTES` of
    Python's sources. `held_out` is the fraction at the end that is not used for training.

    Raises: ValueError if the text is missing, unreadable or empty.
    """
    files = find_text(path)
    pieces, num_bytes = [], 0
    for document in read_documents(files, _limit(path, max_bytes)):
        pieces.append(vocabulary.encode(document))
        num_bytes += len(document)
    if not num_bytes:
        raise ValueError(f"the text {path or 'of the standard library'} is empty")
    tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    train, rest = split_tokens(tokens, held_out)
    return Corpus(train=train, held_out=rest, num_files=len(pieces), num_bytes=num_bytes)


def text_bytes(path: str, *, max_bytes: int = 0) -> int:
    """Returns the number of bytes that `load_corpus` would read, without reading them.

    Raises: ValueError if the text is missing or empty.
    """
    size = sum(file.stat().st_size for file in find_text(path))
    if not size:
        raise ValueError(f"the text {path or 'of the standard library'} is empty")
    limit = _limit(path, max_bytes)
    return min(size, limit) if limit else size


def _limit(path: str, max_bytes: int) -> int:
    """Returns the most bytes to read; 0 means that there is no limit."""
    return max_bytes if max_bytes or path else DEFAULT_TEXT_BYTES


def split_tokens(tokens: TokenArray, held_out: float) -> tuple[TokenArray, TokenArray]:
    """Returns the first tokens, and the last `held_out` fraction of them."""
    cut = len(tokens) - int(len(tokens) * held_out)
    return tokens[:cut], tokens[cut:]
