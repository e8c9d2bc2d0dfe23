"""Finds and opens the corpora of a run: text in memory, token files, and folders of `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from axonn_ext.data.arrow import ArrowTokens, is_arrow_folder
from axonn_ext.data.indexed import IndexedTokens
from axonn_ext.data.mixture import BLOCK, Mixture, parse_mixture, shares
from axonn_ext.data.orders import Order, RandomWindows, ShuffledDocuments
from axonn_ext.data.source import (
    DEFAULT_TEXT_BYTES,
    check_utf8,
    expand_home,
    find_text,
    read_documents,
)
from axonn_ext.data.tokens import ArrayTokens, Part, Tokens, split
from axonn_ext.data.units import JSON_LINES
from axonn_ext.data.vocabulary import ByteVocabulary, Vocabulary
from axonn_ext.spec.files.files import is_folder
from axonn_ext.spec.files.token_files import TokenFiles, find_token_files
from axonn_ext.spec.stream import PREFIX as STREAM

WINDOWS, DOCUMENTS = "windows", "documents"


@dataclass(frozen=True)
class Source:
    """A corpus that was found but is not open yet.

    name      as given; "": Python's own sources; "hf:...": a stream
    weight    in the mixture
    files     token files; None: a text, or a folder of `datasets`
    folder    of `datasets`
    """

    name: str
    weight: float = 1.0
    files: TokenFiles | None = None
    folder: Path | None = None

    @property
    def is_text(self) -> bool:
        """Whether the corpus must be read and encoded; it lies in memory unless it is a stream."""
        return self.files is None and self.folder is None

    @property
    def is_stream(self) -> bool:
        """Whether `datasets` reads the corpus as the run goes on."""
        return self.name.startswith(STREAM)


@dataclass(frozen=True)
class CorpusOptions:
    """How sources are read.

    held_out     the fraction at the end that is not used for training: of the tokens, or with
                 order "documents" of the documents
    max_bytes    of each text; 0 means all of a named text, and DEFAULT_TEXT_BYTES of Python's
                 sources
    vocab_size   tokens that are not below it are refused; None: no limit
    """

    order: str = WINDOWS
    held_out: float = 0.05
    max_bytes: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True)
class OpenSource:
    """An open corpus, split into parts for training and evaluation."""

    source: Source
    tokens: Tokens
    train: Part
    held_out: Part
    num_bytes: int = 0  # of text that was read


@dataclass(frozen=True)
class Corpus:
    """All sources of a run, and the order in which their sequences come."""

    sources: tuple[OpenSource, ...]
    order: str = WINDOWS
    weights: tuple[float, ...] = field(default=(1.0,))

    @property
    def num_documents(self) -> int:
        return sum(each.tokens.num_documents for each in self.sources)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of text read; token files are not text."""
        return sum(each.num_bytes for each in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(each.tokens.num_tokens for each in self.sources)

    def training_order(self, *, sequence_length: int, batch_size: int, seed: int) -> Order:
        """Returns the order of the sequences for training.

        Raises: ValueError if a source is shorter than a sequence, or its share of 1,024 is 0.
        """
        orders: list[Order] = []
        for number, each in enumerate(self.sources):
            if self.order == DOCUMENTS:
                made: Order = ShuffledDocuments(
                    each.train, sequence_length=sequence_length, seed=seed, source=number
                )
            else:
                made = RandomWindows(
                    each.train, sequence_length=sequence_length, batch_size=batch_size, seed=seed,
                    source=number,
                )  # fmt: skip
            orders.append(made)
        if len(orders) == 1:
            return orders[0]
        return Mixture(orders, mixture_shares([each.source for each in self.sources]), seed=seed)

    def held_out(self) -> list[Part]:
        return [each.held_out for each in self.sources]


def find_sources(text: str, mixture: str = "") -> tuple[Source, ...]:
    """Returns the sources that a text or a mixture names, without opening them.

    Raises: ValueError if a source does not exist or has no share of the mixture.
    """
    if not mixture:
        return (find_source(text),)
    if text:
        raise ValueError(f"expected a text or a mixture, got both: {text} and {mixture}")
    sources = tuple(find_source(path, weight) for path, weight in parse_mixture(mixture))
    for source in sources:
        if source.is_stream:
            raise ValueError(f"expected no stream in a mixture, got {source.name}")
    mixture_shares(sources)
    return sources


def mixture_shares(sources: Sequence[Source]) -> list[int]:
    """Returns each source's share of every BLOCK sequences. Raises ValueError if one is 0."""
    result = shares([source.weight for source in sources])
    for source, share in zip(sources, result, strict=True):
        if not share:
            raise ValueError(
                f"the weight {source.weight:g} of {source.name} is less than one of {BLOCK} "
                "sequences; raise it, or leave it out"
            )
    return result


def find_source(name: str, weight: float = 1.0) -> Source:
    """Returns the corpus of this name.

    Token files are named by PREFIX, PREFIX.bin or PREFIX.idx. A file named just PREFIX is a text,
    as is a folder that `datasets` did not write.

    Raises: ValueError if one of the token files is missing, or for a folder of several data sets.
    """
    if name == STREAM:
        raise ValueError(f"expected {STREAM}NAME, a data set's name or folder, got only {STREAM}")
    if not name or name.startswith(STREAM):
        return Source(name, weight)
    path = expand_home(name)
    if is_folder(path):
        return Source(name, weight, folder=path if is_arrow_folder(path) else None)
    return Source(name, weight, files=find_token_files(path))


def open_tokens(source: Source) -> Tokens:
    """Opens token files or a folder of `datasets`, without reading the tokens.

    Raises: ValueError, with the file's name, if a file is incomplete.
    """
    if source.files is not None:
        return IndexedTokens(source.files)
    assert source.folder is not None
    return ArrowTokens(source.folder)


def load_corpus(
    sources: Sequence[Source], vocabulary: Vocabulary | None, options: CorpusOptions
) -> Corpus:
    """Opens all sources. Text is read and encoded by the vocabulary as one stream of tokens.

    vocabulary: may be None if no source is text.

    Raises: ValueError if a source is missing, unreadable or empty.
    """
    opened = tuple(_open(source, vocabulary, options) for source in sources)
    return Corpus(opened, options.order, tuple(source.weight for source in sources))


def text_bytes(path: str, *, max_bytes: int = 0) -> int:
    """Returns the number of bytes of a text that `load_corpus` would read, without reading them.

    Raises: ValueError if the text is missing, empty or JSON lines.
    """
    size = sum(file.stat().st_size for file in _find_plain_text(path))
    if not size:
        raise ValueError(f"the text {path or 'of the standard library'} is empty")
    limit = _limit(path, max_bytes)
    return min(size, limit) if limit else size


def _open(source: Source, vocabulary: Vocabulary | None, options: CorpusOptions) -> OpenSource:
    num_bytes = 0
    if source.is_text:
        assert vocabulary is not None, "a text needs a vocabulary"
        tokens, num_bytes = _read_text(source.name, vocabulary, options)
    else:
        tokens = open_tokens(source)
    train, held_out = split(
        tokens, options.held_out, by_documents=options.order == DOCUMENTS,
        vocab_size=options.vocab_size,
    )  # fmt: skip
    return OpenSource(source, tokens, train, held_out, num_bytes)


def _read_text(name: str, vocabulary: Vocabulary, options: CorpusOptions) -> tuple[Tokens, int]:
    files, limit = _find_plain_text(name), _limit(name, options.max_bytes)
    encoded, num_bytes = [], 0
    for file, document in zip(files, read_documents(files, limit), strict=False):
        if name and not isinstance(vocabulary, ByteVocabulary):
            check_utf8(document, file, cut=bool(limit))
        encoded.append(vocabulary.encode(document))
        num_bytes += len(document)
    if not num_bytes:
        raise ValueError(f"the text {name or 'of the standard library'} is empty")
    tokens = encoded[0] if len(encoded) == 1 else np.concatenate(encoded)
    if options.vocab_size is not None and int(tokens.max()) >= options.vocab_size:
        raise ValueError(
            f"token {int(tokens.max())} does not lie in the vocabulary of {options.vocab_size}; "
            "raise model.vocab_size"
        )
    lengths = [len(document) for document in encoded]
    return ArrayTokens(tokens, lengths, name=name or "the standard library"), num_bytes


def _find_plain_text(name: str) -> list[Path]:
    files = find_text(name)
    if any(file.suffix == JSON_LINES for file in files):
        raise ValueError(
            f"{name} has JSON lines: train on what `axonn-ext tokenize --text {name}` writes, or, "
            f"for prompts and chats, use `axonn-ext finetune --data {name}`"
        )
    return files


def _limit(path: str, max_bytes: int) -> int:
    """Returns the maximum number of bytes to read; 0 means no limit."""
    return max_bytes if max_bytes or path else DEFAULT_TEXT_BYTES
