"""Documents of Hugging Face's `datasets`, tokenized and cut into sequences as they arrive.

Rank 0 reads the stream and sends each step's sequences to all ranks, so that neither the order nor
the place in the stream depends on the grid. As in the order "documents", the documents stand one
after the other, and neighbouring sequences share a token.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from axonn_ext.data.arrow import STATE
from axonn_ext.data.permutation import STREAM, Permutation
from axonn_ext.data.source import expand_home
from axonn_ext.data.units import pieces, whole_text
from axonn_ext.data.vocabulary import TokenArray, Vocabulary
from axonn_ext.spec.stream import PREFIX, StreamOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 256  # documents of a block if none are shuffled
_ENCODED_TOGETHER = 64  # documents
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The next token of a stream: epoch, block, document in the block, token in the document.

    source: the state of the data set where the block begins; None: the start of the epoch.
    """

    epoch: int = 0
    block: int = 0
    source: Mapping[str, Any] | None = None
    document: int = 0
    token: int = 0


class Documents:
    """The tokens of the documents of a data set, epoch by epoch, from any place on.

    Each `shuffle_buffer` documents are a block, which epoch e has in the order of the Permutation
    with the key (seed, STREAM, e, block). So a place is a few numbers. (The shuffle buffer of
    `datasets` forgets its documents when a stream is resumed.)

    Raises: ValueError, which names the key, if the library, the data set, its split, its column or
        all documents are missing, and for an append_id that is no token.
    """

    def __init__(
        self, name: str, options: StreamOptions, vocabulary: Vocabulary, *, seed: int = 0
    ) -> None:
        if options.append_id >= vocabulary.num_tokens:
            raise ValueError(
                f"stream.append_id: expected a token below {vocabulary.num_tokens}, or -1 for "
                f"none, got {options.append_id}"
            )
        self.name, self.options, self.seed, self._vocabulary = name, options, seed, vocabulary
        self._size = options.shuffle_buffer or _BLOCK
        every = _open(name, options)
        first = self._read(lambda: next(iter(every), None))
        if first is None:
            raise ValueError(f"{name} has no document in the split {options.split} (stream.split)")
        if options.column not in first:
            raise ValueError(
                f"{name} has no column {options.column} (stream.column); it has {', '.join(first)}"
            )
        self._every = every.select_columns([options.column])

    @property
    def identity(self) -> dict[str, Any]:
        """All that a place in the stream depends on, except the contents of the data set.

        A folder may have moved, so its path does not count.
        """
        is_folder = expand_home(self.name.removeprefix(PREFIX)).exists()
        return {
            "text": "a folder" if is_folder else self.name,
            "seed": self.seed if self.options.shuffle_buffer else 0,
            **asdict(self.options),
        }

    def held_out(self) -> TokenArray:
        """Returns the tokens for evaluation. Raises the errors of `documents`."""
        rows = self._read(lambda: list(self._every.take(self.options.held_out)))
        texts = [self._text(row, number) for number, row in enumerate(rows)]
        return np.concatenate([np.empty(0, np.int32), *self._encode(texts)]).astype(np.int32)

    def sequences(
        self, place: Place, *, count: int, length: int
    ) -> Iterator[tuple[NDArray[np.int32], Place]]:
        """Yields without end the next `count` sequences [count, length + 1], and the place after.

        Raises the errors of `documents`.
        """
        held: deque[tuple[Place, TokenArray]] = deque()
        total, step = 0, count * length
        windows = length * np.arange(count)[:, None] + np.arange(length + 1)
        skipped = place.token  # in the first document
        for here, tokens in self.documents(place):
            held.append((replace(here, token=skipped), tokens[skipped:]))
            total, skipped = total + len(held[-1][1]), 0
            while total > step:
                rows = np.concatenate([tokens for _, tokens in held])[windows].astype(np.int32)
                left = step
                while left >= len(held[0][1]):
                    left -= len(held.popleft()[1])
                first, tokens = held.popleft()
                held.appendleft((replace(first, token=first.token + left), tokens[left:]))
                total -= step
                yield rows, held[0][0]

    def documents(self, place: Place) -> Iterator[tuple[Place, TokenArray]]:
        """Yields without end the documents from that of `place` on, with their places.

        Raises: ValueError if the data set cannot be read, for a row without text, by its number in
            the split, and for an epoch without tokens.
        """
        while True:
            found = 0
            for here, tokens in self._epoch(place):
                found += len(tokens)
                yield here, tokens
            if place == Place(place.epoch) and not found:
                raise ValueError(
                    f"{self.name} has no text for training after the {self.options.held_out} "
                    "documents of stream.held_out"
                )
            place = Place(place.epoch + 1)

    def _epoch(self, place: Place) -> Iterator[tuple[Place, TokenArray]]:
        """Yields the documents of an epoch from that of `place` on."""
        data, source = self._every.skip(self.options.held_out), place.source
        if source is not None:
            data.load_state_dict(dict(source))
        stream, done = iter(data), place.document
        for block in itertools.count(place.block):
            rows = self._read(lambda: list(itertools.islice(stream, self._size)))
            if not rows:
                return
            first = self.options.held_out + block * self._size
            texts = [self._text(row, first + number) for number, row in enumerate(rows)]
            order = np.arange(len(rows))
            if self.options.shuffle_buffer:
                key = (self.seed, STREAM, place.epoch, block)
                order = Permutation(len(rows), key).apply(order)
            for begin in range(done, len(rows), _ENCODED_TOGETHER):
                chosen = [texts[i] for i in order[begin : begin + _ENCODED_TOGETHER]]
                for number, tokens in enumerate(self._encode(chosen), start=begin):
                    yield Place(place.epoch, block, source, number), tokens
            source, done = data.state_dict(), 0

    def _text(self, row: Mapping[str, Any], number: int) -> bytes:
        text = row.get(self.options.column)
        if not isinstance(text, str):
            raise ValueError(
                f"{self.name}, row {number} of {self.options.split}: expected text in the column "
                f"{self.options.column} (stream.column), got {type(text).__name__}"
            )
        return whole_text(text).encode()

    def _encode(self, texts: list[bytes]) -> list[TokenArray]:
        """Returns the tokens of each text; the last token is append_id, except of empty texts."""
        parts = [list(pieces(text)) for text in texts]
        encoded = iter(self._vocabulary.encode_all([piece for each in parts for piece in each]))
        found = [np.concatenate(list(itertools.islice(encoded, len(each)))) for each in parts]
        if self.options.append_id < 0:
            return found
        return [np.append(each, self.options.append_id) if len(each) else each for each in found]

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Exception as error:  # of the library, the network, a file or its format
            raise ValueError(f"cannot read {self.name}: {error}") from error


def _open(name: str, options: StreamOptions) -> Any:
    """Returns the split as an IterableDataset. Raises ValueError."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "expected datasets to be installed, got no such package: "
            "pip install 'axonn-ext[datasets]'"
        ) from None
    path, subset = expand_home(name.removeprefix(PREFIX)), options.subset
    if path.is_file():
        raise ValueError(
            f"expected a folder or a name on the hub after {PREFIX}, got the file {path}"
        )
    try:
        if any((path / file).is_file() for file in (STATE, "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), subset or None, streaming=True)
    except Exception as error:  # whatever the library and the network raise
        of = f" (stream.subset {subset})" if subset else ""
        no_folder = "" if path.is_dir() else f"; there is no folder {path} here"
        raise ValueError(f"cannot open {name}{of}: {error}{no_folder}") from None
    if not isinstance(found, dict):
        found = {str(found.split or options.split): found}
    if options.split not in found:
        raise ValueError(
            f"{name} has no split {options.split} (stream.split); it has {', '.join(found)}"
        )
    split = found[options.split]
    return split.to_iterable_dataset() if isinstance(split, datasets.Dataset) else split
