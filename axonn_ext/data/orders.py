"""Orders in which a corpus is read: sequence i of a run depends only on the seed and i.

S tokens of a sequence; an order returns S + 1 of each, since labels are the next tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from axonn_ext.data.chunk_ends import kept
from axonn_ext.data.permutation import DOCUMENTS, SEQUENCES, Permutation
from axonn_ext.data.tokens import Part, document_note

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1024  # documents of an epoch's order for which one number is kept
KEPT_FROM = 1 << 20  # documents; their lengths take a quarter of a second to look up
_CHUNKS_AT_ONCE = 64  # chunks whose lengths are looked up together
_SEQUENCES_AT_ONCE = 32  # sequences whose chunks are looked up together
_PHILOX_WORDS = 4  # number of 64-bit words that Philox draws per counter


class Order(Protocol):
    """An endless order of sequences."""

    sequence_length: int

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns the sequences first .. first + count - 1, [count, S + 1]."""
        ...

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns a number for each of these tokens, which changes where a document begins."""
        ...


class RandomWindows:
    """Random windows of the stream of tokens.

    Philox with the key (seed, t) draws the start of sequence t * batch_size + j at the counter
    (j, source), so that the sources of a mixture draw different ones.

    Raises: ValueError if the part is shorter than one sequence.
    """

    def __init__(
        self, part: Part, *, sequence_length: int, batch_size: int, seed: int = 0, source: int = 0
    ) -> None:
        check_length(part, sequence_length, "training")
        self.sequence_length = sequence_length
        self._part, self._batch_size, self._seed, self._source = part, batch_size, seed, source

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        return windows(self._part, self._starts(first, count), self.sequence_length)

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        return self._part.documents(self._starts(first, count), self.sequence_length + 1)

    def _starts(self, first: int, count: int) -> NDArray[np.int64]:
        drawn, end = [np.empty(0, dtype=np.uint64)], first + count
        while first < end:
            step, place = divmod(first, self._batch_size)
            here = min(end - first, self._batch_size - place)
            drawn.append(_philox((self._seed, step), (place, self._source), here))
            first += here
        num_starts = self._part.count - self.sequence_length
        # The modulo bias is at most num_starts / 2**64.
        return (np.concatenate(drawn) % np.uint64(num_starts)).astype(np.int64)


class ShuffledDocuments:
    """All documents once per epoch, cut into sequences; each epoch orders both anew.

    The documents of epoch e stand in the order of the Permutation with the key (seed, DOCUMENTS,
    e, source), one after the other. Stretch q of that stream is its tokens q S .. (q + 1) S, so
    that neighbours share one token, which is the label of one and the input of the other. The last
    tokens of an epoch, fewer than S, belong to none and are left out. Place p of the epoch has the
    stretch to which the Permutation with the key (seed, SEQUENCES, e, source) sends p: without it
    a document longer than a batch would fill whole batches.

    Raises: ValueError if the part is shorter than one sequence.
    """

    def __init__(self, part: Part, *, sequence_length: int, seed: int = 0, source: int = 0) -> None:
        check_length(part, sequence_length, "training", note=document_note(part))
        self.sequence_length = sequence_length
        self.sequences_per_epoch = (part.count - 1) // sequence_length
        self._part, self._seed, self._source = part, seed, source
        self._epoch = self._begin(0)

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows(first, count, _Epoch.read)

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows(first, count, _Epoch.documents)

    def _rows(
        self, first: int, count: int, look: Callable[[_Epoch, NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Returns the results of `look` for the stretches of each epoch."""
        rows = [np.empty((0, self.sequence_length + 1), dtype=np.int64)]
        end = first + count
        while first < end:
            epoch, place = divmod(first, self.sequences_per_epoch)
            here = min(end - first, self.sequences_per_epoch - place, _SEQUENCES_AT_ONCE)
            if epoch != self._epoch.number:
                self._epoch = self._begin(epoch)
            places = np.arange(place, place + here, dtype=np.int64)
            rows.append(look(self._epoch, self._stretches(epoch).apply(places)))
            first += here
        return np.concatenate(rows)

    def _begin(self, epoch: int) -> _Epoch:
        key = (self._seed, DOCUMENTS, epoch, self._source)
        return _Epoch(self._part, epoch, key, self.sequence_length)

    def _stretches(self, epoch: int) -> Permutation:
        key = (self._seed, SEQUENCES, epoch, self._source)
        return Permutation(self.sequences_per_epoch, key)


class _Epoch:
    """The documents of a part in the order of one epoch, as one stream of tokens.

    A document's position in the stream is the sum of the lengths before it. Only every CHUNK-th sum
    is kept; they are computed once, when the epoch is first read, and stored next to the corpus if
    it lies in files.
    """

    def __init__(self, part: Part, number: int, key: tuple[int, ...], sequence_length: int) -> None:
        self.number = number
        self._part, self._key, self._length = part, key, sequence_length
        self._order = Permutation(part.num_documents, key)
        self._ends: NDArray[np.int64] | None = None  # of each chunk, in tokens of the stream

    def read(self, stretches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns these stretches of the stream, [len(stretches), S + 1]."""
        rows = [[self._part.read(place, count) for _, place, count in row]
                for row in self._find(stretches)]  # fmt: skip
        return np.stack([np.concatenate(row) for row in rows])

    def documents(self, stretches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a number for each token of these stretches, different for each document."""
        rows = [np.array(row, dtype=np.int64) for row in self._find(stretches)]
        return np.stack([np.repeat(row[:, 0], row[:, 2]) for row in rows])

    def _find(self, stretches: NDArray[np.int64]) -> list[list[_Piece]]:
        """Returns the pieces of documents that make up each of these stretches."""
        if self._ends is None:
            part, (seed, _, _, source) = self._part, self._key
            depends_on = (CHUNK, seed, source, part.first_document, part.num_documents)
            shelf = part.tokens.shelf if part.num_documents >= KEPT_FROM else None
            self._ends = kept(shelf, depends_on, self.number, self._sums)
        begins = stretches * self._length
        first = np.searchsorted(self._ends, begins, side="right")
        last = np.searchsorted(self._ends, begins + self._length, side="right")
        runs = zip(first.tolist(), last.tolist(), strict=True)
        chunks = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in runs]))
        documents = self._look_up(chunks, self._ends)
        return [self._pieces(begin, documents) for begin in begins.tolist()]

    def _look_up(self, chunks: NDArray[np.int64], ends: NDArray[np.int64]) -> _Places:
        places = (chunks[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)
        starts, lengths = self._documents(places[places < self._part.num_documents])
        sums = np.cumsum(lengths)
        # Chunks may be missing in between: each begins where the table says.
        begins = np.where(chunks > 0, ends[chunks - 1], 0)
        before = np.concatenate([[0], sums[CHUNK - 1 :: CHUNK]])[: len(chunks)]
        sums += np.repeat(begins - before, CHUNK)[: len(sums)]
        return _Places(starts, sums - lengths, sums)

    def _pieces(self, begin: int, documents: _Places) -> list[_Piece]:
        """Returns the pieces of the stretch at `begin`, from documents that were looked up."""
        pieces, end = [], begin + self._length + 1
        index = int(np.searchsorted(documents.ends, begin, side="right"))
        while begin < end:
            here = min(end, int(documents.ends[index])) - begin
            if here > 0:
                skipped = begin - int(documents.begins[index])
                place = int(documents.starts[index]) - self._part.first + skipped
                pieces.append(_Piece(index, place, here))
                begin += here
            index += 1
        return pieces

    def _documents(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the first tokens and the lengths of documents, by their place in the order."""
        part = self._part
        documents = self._order.apply(places) + part.first_document
        starts = part.tokens.starts(documents)
        lengths = part.tokens.starts(documents + 1) - starts
        if len(lengths) and int(lengths.min()) < 0:
            worst = int(documents[np.argmin(lengths)])
            raise ValueError(
                f"{part.tokens.name} is damaged: document {worst} ends before it begins"
            )
        return starts, lengths

    def _sums(self) -> NDArray[np.int64]:
        """Returns where each chunk ends in the stream."""
        count, at_once = self._part.num_documents, _CHUNKS_AT_ONCE * CHUNK
        sums = []
        for first in range(0, count, at_once):
            places = np.arange(first, min(first + at_once, count), dtype=np.int64)
            _, lengths = self._documents(places)
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), CHUNK)))
        ends = np.cumsum(np.concatenate(sums), dtype=np.int64)
        if ends[-1] != self._part.count:
            raise ValueError(
                f"{self._part.tokens.name} is damaged: its documents have {ends[-1]:,} "
                f"tokens together, expected {self._part.count:,}"
            )
        return ends


class _Piece(NamedTuple):
    """A piece of a document: its number among those looked up, and tokens of the part."""

    number: int
    place: int
    num_tokens: int


class _Places(NamedTuple):
    """Each document's first token in the corpus, and its begin and end in the stream."""

    starts: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def windows(part: Part, starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Returns the windows of S + 1 tokens from these starts."""
    if not len(starts):
        return np.empty((0, sequence_length + 1), dtype=np.int64)
    return np.stack([part.read(start, sequence_length + 1) for start in starts.tolist()])


def check_sequence_length(sequence_length: int) -> None:
    """Raises ValueError for a sequence_length below 1."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be >= 1, got {sequence_length}")


def check_length(part: Part, sequence_length: int, kind: str, *, note: str = "") -> None:
    """Raises ValueError if the part is shorter than one sequence with its labels.

    A sequence has at least one token. note: ends the message.
    """
    check_sequence_length(sequence_length)
    if part.count <= sequence_length:
        raise ValueError(
            f"the {kind} text has {part.count} tokens, but a sequence of {sequence_length} with "
            f"its labels needs {sequence_length + 1}{note}"
        )


def _philox(key: tuple[int, int], counter: tuple[int, int], count: int) -> NDArray[np.uint64]:
    """Draws 64 bits for each of `count` counters, whose first word increases by 1."""
    generator = np.random.Philox(
        key=np.array(key, dtype=np.uint64), counter=np.array([*counter, 0, 0], dtype=np.uint64)
    )
    return generator.random_raw(_PHILOX_WORDS * count)[::_PHILOX_WORDS]
