"""Turns text into token ids: its bytes, or the tokens of a `tokenizers` JSON file."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from axonn_ext.data.source import expand_home
from axonn_ext.data.units import pieces

# A vocabulary is split over x and z (and the features of its embedding over y), so its size is
# rounded up to a number that any usual grid divides. Ids >= `num_tokens` never occur in the text.
VOCABULARY_MULTIPLE = 128
_BATCH_BYTES = 1 << 19  # bytes of text that the tokenizers library encodes at once

TokenArray = np.ndarray[Any, np.dtype[np.integer[Any]]]
BYTES = "bytes"


class Vocabulary(Protocol):
    """The interface of a vocabulary."""

    num_tokens: int
    sha256: str | None  # of the file that defines it, if one does

    def encode(self, document: bytes) -> TokenArray:
        """Returns the token ids of one document."""
        ...

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Returns the token ids of each text, which has a few MB at most."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Returns human-readable text for token ids."""
        ...


class ByteVocabulary:
    """A vocabulary of 256 tokens, the bytes; any file is valid text."""

    num_tokens = 256
    sha256: str | None = None

    def encode(self, document: bytes) -> TokenArray:
        return np.frombuffer(document, dtype=np.uint8)

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class TokenizerVocabulary:
    """The vocabulary of a JSON file of the `tokenizers` library.

    `encode` cuts long documents into pieces (see `units.cut_after`), since the library needs on the
    order of a hundred bytes of memory per token.

    Raises: ValueError if the library or the file is missing, or the file is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                f"a vocabulary from {path} needs the tokenizers library (pip install tokenizers); "
                'without it use vocabulary = "bytes"'
            ) from None
        try:
            if not path.is_file():
                raise ValueError(f"{path} is not a file")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f'expected "bytes" or a tokenizers JSON file, but {reason}') from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no more specific exception
            raise ValueError(f"{path} is not a tokenizers JSON file: {error}") from None
        # The file may set truncation and padding, which are not wanted here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.path = path
        self.num_tokens = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.sha256: str | None = hashlib.sha256(path.read_bytes()).hexdigest()

    def encode(self, document: bytes) -> TokenArray:
        encoded = self.encode_all(list(pieces(document)))
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded)

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        encoded: list[TokenArray] = []
        batch: list[str] = []
        batch_bytes = 0
        for text in texts:
            batch.append(text.decode("utf-8", errors="replace"))
            batch_bytes += len(text)
            if batch_bytes >= _BATCH_BYTES:
                encoded += self._encode_batch(batch)
                batch, batch_bytes = [], 0
        return encoded + self._encode_batch(batch)

    @property
    def front(self) -> list[int]:
        """The ids that the tokenizer puts before a text."""
        probe = self._tokenizer.encode("a")
        added = zip(probe.ids, probe.special_tokens_mask, strict=True)
        return [token for token, _ in itertools.takewhile(lambda each: each[1], added)]

    def find(self, token: str) -> int | None:
        """Returns the id of a token, such as `</s>`; None if there is no such token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode_placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text, and the characters of the text [begin, end) of each."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def _encode_batch(self, texts: list[str]) -> list[TokenArray]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


@dataclass(frozen=True)
class StoredVocabulary:
    """The known properties of the vocabulary of stored tokens."""

    name: str
    num_tokens: int
    sha256: str | None = None


def open_vocabulary(name: str) -> Vocabulary:
    """Returns the vocabulary called `name`: "bytes", or the path of a tokenizers JSON file."""
    if name == BYTES:
        return ByteVocabulary()
    try:
        path = expand_home(name)
    except ValueError as error:
        raise ValueError(f'expected "bytes" or a tokenizers JSON file, but {error}') from None
    return TokenizerVocabulary(path)


def padded_size(num_tokens: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Returns `num_tokens` rounded up to a multiple that grids divide."""
    return -(-num_tokens // multiple) * multiple
