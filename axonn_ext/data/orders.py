"""Orders in which a corpus is read: sequence number i of a run is a function of (seed, i) alone.

S tokens of a sequence; an order returns S + 1 of each, since labels are the next tokens.
"""

from __future__ import annotations

import bisect
from array import array
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.permutation import DOCUMENTS, Permutation
from axonn_ext.data.tokens import Part

CHUNK = 1024  # documents of an epoch's order, for which one number is kept
_CHUNKS_AT_ONCE = 64  # whose lengths are looked up together
_PHILOX_WORDS = 4  # the 64-bit words that Philox draws for one counter


class Order(Protocol):
    """An order of sequences without an end."""

    sequence_length: int

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns the sequences first .. first + count - 1, [count, S + 1]."""
        ...


class RandomWindows:
    """Random windows of the stream of tokens.

    Philox with the key (seed, t) draws the start of sequence t * batch_size + j at counter j.

    Raises: ValueError if the part is shorter than one sequence.
    """

    def __init__(self, part: Part, *, sequence_length: int, batch_size: int, seed: int = 0) -> None:
        check_length(part, sequence_length, "training")
        self.sequence_length = sequence_length
        self._part, self._batch_size, self._seed = part, batch_size, seed

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        drawn, end = [], first + count
        while first < end:
            step, place = divmod(first, self._batch_size)
            here = min(end - first, self._batch_size - place)
            drawn.append(_philox(self._seed, step, place, here))
            first += here
        num_starts = self._part.count - self.sequence_length
        # The modulo makes no start more likely than another by a share above num_starts / 2**64.
        starts = np.concatenate(drawn) % np.uint64(num_starts)
        return windows(self._part, starts.astype(np.int64), self.sequence_length)


class ShuffledDocuments:
    """All documents once an epoch, in an order of the epoch's own, cut into sequences.

    The documents of epoch e stand in the order of the Permutation with the key (seed, DOCUMENTS,
    e), one after the other. Sequence q of the epoch is the tokens q S .. (q + 1) S of that stream,
    so that neighbours share one token, which is the label of one and the input of the other. The
    last tokens of an epoch, fewer than S, make no sequence and are left out.

    Raises: ValueError if the part is shorter than one sequence.
    """

    def __init__(self, part: Part, *, sequence_length: int, seed: int = 0) -> None:
        check_length(part, sequence_length, "training")
        self.sequence_length = sequence_length
        self.sequences_per_epoch = (part.count - 1) // sequence_length
        self._part, self._seed = part, seed
        self._epoch = _Epoch(part, 0, seed)

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        length = self.sequence_length
        rows = np.empty((count, length + 1), dtype=np.int64)
        done = 0
        while done < count:
            epoch, place = divmod(first + done, self.sequences_per_epoch)
            here = min(count - done, self.sequences_per_epoch - place)
            if epoch != self._epoch.number:
                self._epoch = _Epoch(self._part, epoch, self._seed)
            stream = self._epoch.read(place * length, here * length + 1)
            rows[done : done + here, :-1] = stream[:-1].reshape(here, length)
            rows[done : done + here, -1] = stream[length::length]
            done += here
        return rows


class _Epoch:
    """The documents of a part in the order of one epoch, as one stream of tokens.

    Where a document lies in the stream follows from the lengths of all before it. Of their sums
    only every CHUNK-th is kept, and they are computed no further than the stream has been read.
    """

    def __init__(self, part: Part, number: int, seed: int) -> None:
        self.number = number
        self._part = part
        self._order = Permutation(part.num_documents, (seed, DOCUMENTS, number))
        self._ends = array("q")  # of chunk after chunk, in tokens of the stream

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns the tokens start .. start + count - 1 of the stream."""
        self._extend(start + count)
        chunk = bisect.bisect_right(self._ends, start)
        pieces, end = [], start + count
        while start < end:
            begin = self._ends[chunk - 1] if chunk else 0
            first, lengths = self._documents(chunk * CHUNK, CHUNK)
            last = begin + np.cumsum(lengths)
            index = int(np.searchsorted(last, start, side="right"))
            while start < end and index < len(last):
                skipped = start - int(last[index] - lengths[index])
                here = min(end, int(last[index])) - start
                if here > 0:
                    place = int(first[index]) - self._part.first + skipped
                    pieces.append(self._part.read(place, here))
                    start += here
                index += 1
            chunk += 1
        return np.concatenate(pieces)

    def _documents(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the first tokens, and the lengths, of documents by their place in the order."""
        part = self._part
        places = np.arange(first, min(first + count, part.num_documents), dtype=np.int64)
        documents = self._order.apply(places) + part.first_document
        starts = part.tokens.starts(documents)
        lengths = part.tokens.starts(documents + 1) - starts
        if len(lengths) and int(lengths.min()) < 0:
            worst = int(documents[np.argmin(lengths)])
            raise ValueError(
                f"{part.tokens.name} is damaged: document {worst} ends before it begins"
            )
        return starts, lengths

    def _extend(self, end: int) -> None:
        """Computes sums until they reach `end`."""
        while not self._ends or self._ends[-1] < end:
            first = len(self._ends) * CHUNK
            if first >= self._part.num_documents:
                raise ValueError(
                    f"{self._part.tokens.name} is damaged: its documents have {self._ends[-1]:,} "
                    f"tokens together, expected {self._part.count:,}"
                )
            _, lengths = self._documents(first, _CHUNKS_AT_ONCE * CHUNK)
            before = self._ends[-1] if self._ends else 0
            sums = np.add.reduceat(lengths, np.arange(0, len(lengths), CHUNK))
            self._ends.extend((before + np.cumsum(sums)).tolist())


def windows(part: Part, starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Returns the windows of S + 1 tokens from these starts."""
    if not len(starts):
        return np.empty((0, sequence_length + 1), dtype=np.int64)
    return np.stack([part.read(start, sequence_length + 1) for start in starts.tolist()])


def check_length(part: Part, sequence_length: int, kind: str) -> None:
    """Raises ValueError if the part is shorter than one sequence with its labels."""
    if part.count <= sequence_length:
        raise ValueError(
            f"the {kind} text has {part.count} tokens, but a sequence of {sequence_length} with "
            f"its labels needs {sequence_length + 1}"
        )


def _philox(seed: int, step: int, first: int, count: int) -> NDArray[np.uint64]:
    """Draws 64 bits for each counter first .. first + count - 1, with the key (seed, step)."""
    key = np.array([seed, step], dtype=np.uint64)
    counter = np.array([first, 0, 0, 0], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    return generator.random_raw(_PHILOX_WORDS * count)[::_PHILOX_WORDS]
