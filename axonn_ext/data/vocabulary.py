"""Turns text into token ids: its bytes, or the tokens of a `tokenizers` JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.source import expand_home

# A vocabulary is split over x and z (and the features of its embedding over y), so its size is
# rounded up to a number that every usual grid divides. Ids >= `num_tokens` never occur in the text.
VOCABULARY_MULTIPLE = 128

TokenArray = NDArray[np.integer[Any]]


class Vocabulary(Protocol):
    """The interface of a vocabulary that the data uses."""

    num_tokens: int

    def encode(self, document: bytes, *, special: bool = False) -> TokenArray:
        """Returns the token ids of one document.

        special: with the tokens that the tokenizer puts around a text, such as one that begins it.
        """
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of token ids, for people to read."""
        ...


class ByteVocabulary:
    """A vocabulary of 256 tokens, the bytes; any file is legal text."""

    num_tokens = 256

    def encode(self, document: bytes, *, special: bool = False) -> TokenArray:
        return np.frombuffer(document, dtype=np.uint8)

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class TokenizerVocabulary:
    """The vocabulary of a JSON file of the `tokenizers` library.

    Raises: ValueError when the library or the file is missing, or the file is not a tokenizer.
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
                raise ValueError(f"{path} is no file")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f'expected "bytes" or a tokenizers JSON file, but {reason}') from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no more specific exception
            raise ValueError(f"{path} is not a tokenizers JSON file: {error}") from None
        self.num_tokens = int(self._tokenizer.get_vocab_size())

    def encode(self, document: bytes, *, special: bool = False) -> TokenArray:
        text = document.decode("utf-8", errors="replace")
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def open_vocabulary(name: str) -> Vocabulary:
    """Returns the vocabulary called `name`: "bytes", or the path of a tokenizers JSON file."""
    if name == "bytes":
        return ByteVocabulary()
    try:
        path = expand_home(name)
    except ValueError as error:
        raise ValueError(f'expected "bytes" or a tokenizers JSON file, but {error}') from None
    return TokenizerVocabulary(path)


def padded_size(num_tokens: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Returns `num_tokens` rounded up to a multiple that grids divide."""
    return -(-num_tokens // multiple) * multiple
