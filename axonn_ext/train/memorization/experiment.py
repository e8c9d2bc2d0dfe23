"""An experiment: its settings, its documents, and the files that both arms train on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from axonn_ext.data import ByteVocabulary, Example, PackedBatches, Prompts, Vocabulary, find_text
from axonn_ext.data.index_writer import IndexedWriter, dtype_for
from axonn_ext.data.units import Piece, find_units, read_unit
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_json
from axonn_ext.spec.files.token_files import FORMAT, TokenFiles
from axonn_ext.train.memorization.documents import (
    CONTINUED,
    MOST_TOKENS,
    Document,
    check_documents,
    deal,
    read_documents,
    refuse_overlap,
)
from axonn_ext.train.memorization.generated_text import TextGenerator

READ = "read"  # a key in the settings file
HELD_OUT = 0.05  # last fraction of the background, for validation; at least one document
_BYTES_OF_A_TOKEN = 4  # upper estimate of the characters per token of generated text
_LEAST_LENGTH = 0.8  # generated documents fill this fraction of a sequence, up to all of it

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """Everything that decides an experiment's results, apart from the contents of named files.

    models            Hugging Face folders or checkpoints to train further; else sizes
    trains_on         whether the models are such folders or checkpoints
    repetitions       of each bucket, in ascending order; the first is 0, the control
    per_bucket        maximum number of documents per bucket
    documents         a file of documents; "": generated
    background        a text that is also trained on, once; "": generated
    background_size   number of generated background documents; 0: none
    vocabulary        "bytes", or a file of the tokenizers library; "": each model's own
    overrides         keys of the trainer's configuration, as text
    """

    models: tuple[str, ...]
    trains_on: bool
    repetitions: tuple[int, ...]
    per_bucket: int
    documents: str
    background: str
    background_size: int
    vocabulary: str
    sequence_length: int
    batch_size: int
    lr: float
    seed: int
    goldfish_k: int
    goldfish_h: int
    goldfish_window: str
    overrides: tuple[tuple[str, str], ...] = ()

    def save(self, path: Path, read: Mapping[str, str]) -> None:
        """Writes the settings and the digest of each model's data. Raises OSError."""
        values = dataclasses.asdict(self) | {READ: dict(read)}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def check_saved(self, path: Path, read: Mapping[str, str]) -> None:
        """Raises InputError, which names the first difference from what `save` wrote, if any."""
        saved = read_json(path)
        now = json.loads(json.dumps(dataclasses.asdict(self))) | {READ: dict(read)}
        for key, value in now.items():
            before = saved.get(key) if isinstance(saved, dict) else None
            if before != value and key == READ:
                raise InputError(
                    f"{path}: the documents, the background or the vocabulary are no longer those "
                    "with which the experiment began; bring these back, or give another folder"
                )
            if before != value:
                raise InputError(
                    f"{path}: the experiment to continue has {key} {before!r}, not {value!r}; "
                    "give the same options, or another folder"
                )


@dataclass(frozen=True)
class Exposures:
    """A model's data: documents with their repetitions, and text that is read once.

    validation: not trained on. sequence_length: the model's, in tokens. num_given: number of
    documents before some were left out.
    """

    documents: tuple[Document, ...]
    background: tuple[Tokens, ...]
    validation: tuple[Tokens, ...]
    sequence_length: int
    num_given: int

    @classmethod
    def of(cls, settings: Settings, vocabulary: Vocabulary) -> Exposures:
        """Reads or generates the data. Raises InputError or ValueError if it does not fit."""
        length = settings.sequence_length
        documents, num_given = _documents(settings, vocabulary)
        longest = max(len(document.tokens) for document in documents)
        check_documents(documents, length, vocabulary.num_tokens)
        background = list(_background(settings, vocabulary))
        refuse_overlap(documents, (tokens[:longest] for tokens in background))
        if not background:
            control = [document.tokens for document in documents if not document.repetitions]
            return cls(tuple(documents), (), tuple(control), length, num_given)
        held_out = max(1, int(len(background) * HELD_OUT))
        if held_out == len(background):
            raise InputError(
                f"{settings.background}: expected at least two documents as a background, of which "
                "one is for validation, got one"
            )
        trained, kept = (
            tuple(piece for tokens in part for piece in _pieces(tokens, length))
            for part in (background[:-held_out], background[-held_out:])
        )
        return cls(tuple(documents), trained, kept, length, num_given)

    @property
    def sha256(self) -> str:
        """The digest of all tokens, with the documents' repetitions."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(repr((document.tokens, document.repetitions)).encode())
        for part in (self.background, self.validation):
            digest.update(f"{len(part)} texts".encode())
            for tokens in part:
                digest.update(repr(tokens).encode())
        return digest.hexdigest()

    @property
    def trained(self) -> list[Tokens]:
        """The training data, with each document repeated as often as it is seen."""
        seen = [document.tokens for document in self.documents
                for _ in range(document.repetitions or 0)]  # fmt: skip
        return [*seen, *self.background]

    @property
    def held_out(self) -> float:
        """The fraction of the stored documents, at the end, that the trainer must hold out."""
        count = len(self.validation)
        return (count + 0.5) / (len(self.trained) + count)  # rounded down, it is just `count`

    def num_steps(self, *, batch_size: int, seed: int) -> int:
        """Returns the number of steps in which the trainer reads all packed documents once."""
        examples = [Example(np.array(tokens, dtype=np.int64)) for tokens in self.trained]
        return PackedBatches(
            examples, sequence_length=self.sequence_length, batch_size=batch_size, seed=seed
        ).num_steps(1)

    def write(self, files: TokenFiles, vocabulary: Vocabulary) -> None:
        """Writes the data as token files, with the held-out part last. Raises OSError."""
        stored = [*self.trained, *self.validation]
        lengths = np.array([len(tokens) for tokens in stored], dtype=np.int64)
        dtype = dtype_for(vocabulary.num_tokens)
        description = {
            "format": FORMAT, "vocabulary_size": vocabulary.num_tokens,
            "vocabulary": "a tokenizers file" if vocabulary.sha256 else BYTES,
            "vocabulary_sha256": vocabulary.sha256, "append_id": None,
            "largest_token": max(map(max, stored)), "documents": len(stored),
            "tokens": int(lengths.sum()), "text_bytes": None,
        }  # fmt: skip
        with IndexedWriter(files, dtype) as writer:
            writer.add(
                np.concatenate([np.array(tokens, dtype=dtype) for tokens in stored]), lengths
            )
            writer.finish(description)


def _documents(settings: Settings, vocabulary: Vocabulary) -> tuple[list[Document], int]:
    """Returns the documents of all buckets, and how many there were to choose from."""
    encode = Prompts(vocabulary).prompt
    most = min(MOST_TOKENS, settings.sequence_length)
    if settings.documents:
        found, num_short = read_documents(Path(settings.documents), encode, most_tokens=most)
    else:
        count = settings.per_bucket * len(settings.repetitions)
        texts = _generated(settings, vocabulary, count, seed=2 * settings.seed + 1)
        num_short = 0
        found = [
            Document(tuple(encode(text)[:most]), None, f"generated document {n}")
            for n, text in enumerate(texts)
        ]
    dealt = deal(found, settings.repetitions, each=settings.per_bucket)
    return dealt, len(found) + num_short


def _background(settings: Settings, vocabulary: Vocabulary) -> Iterator[Tokens]:
    """Yields the background documents that have more than one token."""
    if settings.background:
        pieces = (
            piece
            for unit in find_units(find_text(settings.background), "text")
            for piece in read_unit(unit, any_bytes=isinstance(vocabulary, ByteVocabulary))
        )
    else:
        generated = _generated(
            settings, vocabulary, settings.background_size, seed=2 * settings.seed + 2
        )
        pieces = (Piece(text.encode()) for text in generated)
    prompts = Prompts(vocabulary)
    for piece in pieces:
        encode = prompts.document if piece.begins else vocabulary.encode
        tokens = tuple(map(int, encode(piece.text)))
        if len(tokens) > 1:
            yield tokens


def _generated(settings: Settings, vocabulary: Vocabulary, count: int, *, seed: int) -> list[str]:
    scale = 1 if isinstance(vocabulary, ByteVocabulary) else _BYTES_OF_A_TOKEN
    most = min(MOST_TOKENS, settings.sequence_length) * scale
    least = max(int(most * _LEAST_LENGTH), (CONTINUED + 1) * scale)
    return TextGenerator(seed).documents(count, min(least, most), most)


def _pieces(tokens: Tokens, length: int) -> Iterator[Tokens]:
    """Yields pieces that fit a sequence; neighbours share a token, as in the trainer."""
    for start in range(0, len(tokens) - 1, length):
        yield tokens[start : start + length + 1]


def all_repetitions(numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the repetitions of the buckets. Raises ValueError for a list that cannot be used."""
    if len(numbers) < 2 or numbers[0] != 0 or list(numbers) != sorted(set(numbers)):
        raise ValueError(
            "expected 0, which is the control, and then larger numbers, each larger than the one "
            f"before, got {','.join(map(str, numbers))}"
        )
    return tuple(numbers)
