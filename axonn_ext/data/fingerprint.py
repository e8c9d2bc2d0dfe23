"""Digests of corpora, which ranks compare; token files are only sampled."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_ext.data.corpus import DOCUMENTS, Corpus
from axonn_ext.data.examples import Examples
from axonn_ext.data.tokens import ArrayTokens, Tokens
from axonn_ext.spec.files.digests import WHOLE, sampled

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import Stream


def fingerprint(corpus: Corpus | Examples | Stream) -> str:
    """Returns the number of tokens or examples, and a digest of them and of their weights.

    Raises ValueError if a file is damaged.
    """
    digest = hashlib.sha256()
    if isinstance(corpus, Examples):
        for example in (*corpus.train, *corpus.held_out):
            digest.update(f"{len(example.tokens)} {example.learned is None}\n".encode())
            digest.update(example.tokens.astype("<i8").tobytes())
            digest.update(b"" if example.learned is None else example.learned.tobytes())
        digest.update(f"{len(corpus.train)}".encode())
        count = f"{len(corpus.train) + len(corpus.held_out):,} examples"
    elif not isinstance(corpus, Corpus):
        return "a stream"  # only rank 0 reads it
    else:
        digest.update(repr(corpus.weights).encode())
        for each in corpus.sources:
            _add(digest, each.tokens, by_documents=corpus.order == DOCUMENTS)
        count = f"{corpus.num_tokens:,} tokens"
    return f"{count} ({digest.hexdigest()[:12]})"


def _add(digest: Any, tokens: Tokens, *, by_documents: bool) -> None:
    count = tokens.num_tokens
    digest.update(f"{count} {tokens.num_documents}\n".encode())
    in_memory = isinstance(tokens, ArrayTokens)
    for start, length in [(0, count)] if in_memory else sampled(count):
        digest.update(np.ascontiguousarray(tokens.read(start, length)).tobytes())
    if by_documents:
        chosen = np.linspace(0, tokens.num_documents, min(tokens.num_documents + 1, WHOLE))
        digest.update(tokens.starts(chosen.astype(np.int64)).tobytes())
