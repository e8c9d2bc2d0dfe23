"""The documents of the experiment, in buckets of documents that are seen equally often."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonn_ext.data.units import JSON_LINES, parse_line, shown
from axonn_ext.spec.files.errors import InputError

MOST_TOKENS = 2048  # of a document; the rest is left out
CONTINUED = 50  # tokens at its end, which the model should reproduce

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Document:
    """The tokens of a document, and how often it is seen in training.

    where: its place in a file, for messages. repetitions: None if not given.
    """

    tokens: tuple[int, ...]
    repetitions: int | None
    where: str

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[:-CONTINUED]

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.tokens[-CONTINUED:]


def read_documents(
    path: Path, encode: Encode, *, most_tokens: int = MOST_TOKENS
) -> tuple[list[Document], int]:
    """Returns the documents of a .jsonl file with > CONTINUED tokens, and the number of others.

    Each line has a text, or its tokens as a list of ids, and optionally a number of repetitions:
    {"text": "...", "repetitions": 6}. A document is truncated to most_tokens.

    Raises InputError for a file that cannot be read, for a line that is not a document (with the
    line number), or if no document is left.
    """
    if path.suffix != JSON_LINES:
        raise InputError(f"{path}: expected a file of JSON lines, whose name ends in {JSON_LINES}")
    found, num_short = [], 0
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    document = _parse(f"{path}, line {number}", line, encode, most_tokens)
                    num_short += len(document.tokens) <= CONTINUED
                    found.append(document)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(found) == num_short:
        raise InputError(
            f"{path}: expected documents of more than {CONTINUED} tokens (a prompt and a "
            f"continuation), got only {num_short} shorter ones"
        )
    return [document for document in found if len(document.tokens) > CONTINUED], num_short


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Writes documents as `read_documents` reads them, by their tokens. Raises OSError."""
    lines = ({"repetitions": d.repetitions, "tokens": d.tokens} for d in documents)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def deal(
    documents: Sequence[Document], repetitions: Sequence[int], *, each: int | None = None
) -> list[Document]:
    """Returns the documents with their repetitions, bucket by bucket.

    Documents that specify their repetitions keep them, and are left out if there is no such bucket.
    Otherwise they are dealt to the buckets in turn. each: the maximum number per bucket.

    Raises InputError if only some documents specify repetitions, if a bucket is empty, or if two
    documents are equal.
    """
    _refuse_equal(documents)
    unsaid = [document for document in documents if document.repetitions is None]
    if unsaid and len(unsaid) < len(documents):
        raise InputError(
            f"{unsaid[0].where}: expected repetitions, as other documents of the file have them"
        )
    count = len(repetitions)
    if unsaid:
        documents = [
            Document(document.tokens, repetitions[number % count], document.where)
            for number, document in enumerate(documents)
        ]
    found = []
    for wanted in repetitions:
        bucket = [document for document in documents if document.repetitions == wanted][:each]
        if not bucket:
            raise InputError(
                f"the bucket of {wanted} repetitions is empty: expected at least one document of "
                f"more than {CONTINUED} tokens for each of the {count} buckets, got "
                f"{len(documents)} documents"
            )
        found += bucket
    return found


def check_documents(documents: Sequence[Document], sequence_length: int, vocab_size: int) -> None:
    """Raises ValueError for documents that a model of these sizes cannot continue."""
    if not documents:
        raise ValueError("documents: expected at least one, got none")
    for document in documents:
        length = len(document.tokens)
        if not CONTINUED < length <= sequence_length:
            raise ValueError(
                f"{document.where}: expected more than {CONTINUED} and at most {sequence_length} "
                f"tokens, which the model takes, got {length}"
            )
        if not 0 <= min(document.tokens) <= max(document.tokens) < vocab_size:
            raise ValueError(
                f"{document.where}: token ids must be in [0, {vocab_size}), got "
                f"{min(document.tokens)} to {max(document.tokens)}"
            )


def refuse_overlap(documents: Sequence[Document], background: Iterable[tuple[int, ...]]) -> None:
    """Raises InputError if a document is in the background, or begins like one that is."""
    known = {document.tokens: document for document in documents}
    longest = max(len(tokens) for tokens in known)
    for other in background:
        found = known.get(other) or known.get(other[:longest])
        if found is not None:
            raise InputError(
                f"{found.where}: this document is in the background too, so that it would be seen "
                "more often than its bucket says"
            )


def _refuse_equal(documents: Sequence[Document]) -> None:
    first: dict[tuple[int, ...], Document] = {}
    for document in documents:
        other = first.setdefault(document.tokens, document)
        if other is not document:
            raise InputError(
                f"{document.where}: buckets overlap, since this document is that of {other.where}; "
                "each document may appear only once"
            )


def _parse(where: str, line: bytes, encode: Encode, most_tokens: int) -> Document:
    try:
        fields = parse_line(line)
    except ValueError as error:
        raise InputError(f"{where}: {error}; it begins {shown(line)}") from None
    text, tokens, count = (fields.get(key) for key in ("text", "tokens", "repetitions"))
    if count is not None and (type(count) is not int or count < 0):
        raise InputError(f"{where}: repetitions: expected a whole number >= 0, got {count!r}")
    if isinstance(text, str):
        tokens = encode(text) if tokens is None else None
    ids = isinstance(tokens, list) and all(type(each) is int and each >= 0 for each in tokens)
    if not ids or not isinstance(tokens, list):
        raise InputError(
            f"{where}: expected a text, or tokens as a list of whole numbers >= 0; it begins "
            f"{shown(line)}"
        )
    return Document(tuple(tokens[:most_tokens]), count, where)
