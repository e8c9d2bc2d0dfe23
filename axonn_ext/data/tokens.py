"""The tokens of a corpus in any format, and contiguous parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from axonn_ext.data.chunk_ends import Shelf
from axonn_ext.data.vocabulary import TokenArray

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tokens(Protocol):
    """A stream of tokens, cut into documents, of which any stretch can be read by itself."""

    name: str  # for messages
    num_tokens: int
    num_documents: int

    @property
    def shelf(self) -> Shelf | None:
        """Where tables of document orders are kept."""
        ...

    def read(self, start: int, count: int) -> TokenArray:
        """Returns the tokens start .. start + count - 1. Raises ValueError if a file is damaged."""
        ...

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first token of each document; for number num_documents it is num_tokens."""
        ...


class ArrayTokens:
    """Tokens in memory, with the lengths of the documents (default: one document)."""

    shelf = None

    def __init__(
        self, tokens: TokenArray, lengths: Sequence[int] | None = None, *, name: str = "text"
    ) -> None:
        ends = np.cumsum([len(tokens)] if lengths is None else lengths, dtype=np.int64)
        if len(ends) == 0 or ends[-1] != len(tokens):
            raise ValueError(
                f"lengths of documents must sum to the {len(tokens)} tokens, got "
                f"{int(ends[-1]) if len(ends) else 0}"
            )
        self.name = name
        self.num_tokens, self.num_documents = len(tokens), len(ends)
        self._tokens, self._starts = tokens, np.concatenate([np.zeros(1, np.int64), ends])

    def read(self, start: int, count: int) -> TokenArray:
        return self._tokens[start : start + count]

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._starts[documents]


@dataclass(frozen=True)
class Part:
    """A contiguous part of a corpus, for training or held out.

    first, count                       its tokens
    first_document, num_documents      its documents, if it consists of whole ones, else 0
    vocab_size                         tokens that are not below it are refused; None: no limit
    """

    tokens: Tokens
    first: int
    count: int
    first_document: int = 0
    num_documents: int = 0
    vocab_size: int | None = None

    def documents(self, starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Returns the numbers of the documents that tokens belong to, [len(starts), count].

        starts: places in the part, at each of which a run of `count` >= 1 tokens begins.
        """
        begins = starts + self.first
        first, last = (self._documents_of(places) for places in (begins, begins + count - 1))
        rows = np.empty((len(starts), count), dtype=np.int64)
        for row, begin, low, high in zip(rows, begins, first.tolist(), last.tolist(), strict=True):
            others = self.tokens.starts(np.arange(low + 1, high + 1, dtype=np.int64))
            row[:] = low + np.searchsorted(others, begin + np.arange(count), side="right")
        return rows

    def _documents_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the document of each token, given its place in the corpus, by bisection."""
        low = np.zeros(len(places), dtype=np.int64)
        high = np.full(len(places), self.tokens.num_documents, dtype=np.int64)
        while (open_ := high - low > 1).any():
            middle = (low + high) // 2
            begun = self.tokens.starts(middle) <= places
            low = np.where(open_ & begun, middle, low)
            high = np.where(open_ & ~begun, middle, high)
        return low

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns tokens by their place in the part.

        Raises ValueError for a token that the vocabulary lacks.
        """
        read = self.tokens.read(self.first + start, count).astype(np.int64)
        if self.vocab_size is not None and len(read):
            least, most = int(read.min()), int(read.max())
            if least < 0 or most >= self.vocab_size:
                raise ValueError(
                    f"{self.tokens.name} has token {least if least < 0 else most}, near token "
                    f"number {self.first + start:,}: it does not lie in the vocabulary of "
                    f"{self.vocab_size}; raise model.vocab_size"
                )
        return read


def document_note(part: Part) -> str:
    """Returns a note for the message that this part, cut by documents, is too short."""
    if part.count or part.tokens.num_documents > 1:
        return ""
    count = "one document, which is" if part.tokens.num_documents else "no document: one would be"
    return f"; it has {count} held out (data.held_out takes at least one, 0 none)"


def whole(tokens: Tokens, *, vocab_size: int | None = None) -> Part:
    """Returns all of a corpus as one part."""
    return Part(tokens, 0, tokens.num_tokens, 0, tokens.num_documents, vocab_size)


def split(
    tokens: Tokens, held_out: float, *, by_documents: bool, vocab_size: int | None = None
) -> tuple[Part, Part]:
    """Returns the part for training, and the last fraction `held_out` of the tokens.

    by_documents: the last fraction of the documents instead, and at least one unless it is 0.
    """
    if not by_documents:
        cut = tokens.num_tokens - int(tokens.num_tokens * held_out)
        return (
            Part(tokens, 0, cut, vocab_size=vocab_size),
            Part(tokens, cut, tokens.num_tokens - cut, vocab_size=vocab_size),
        )
    count = tokens.num_documents
    kept = max(0, count - (max(1, int(count * held_out)) if held_out else 0))
    cut = int(tokens.starts(np.array([kept], dtype=np.int64))[0])
    return (
        Part(tokens, 0, cut, 0, kept, vocab_size),
        Part(tokens, cut, tokens.num_tokens - cut, kept, count - kept, vocab_size),
    )
