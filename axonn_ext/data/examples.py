"""Examples for fine-tuning: prompts with completions, of which only these are learned, or texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from axonn_ext.data.source import check_utf8, find_text
from axonn_ext.data.tokens import Tokens, whole
from axonn_ext.data.units import JSON_LINES, parse_line, shown
from axonn_ext.data.vocabulary import TokenArray, Vocabulary

_OPEN = 16  # more leave less room empty, but mix the order less


@dataclass(frozen=True)
class Example:
    """Tokens, of which the first num_given, a prompt, are not learned; None: a text."""

    tokens: TokenArray
    num_given: int | None = None

    @property
    def num_places(self) -> int:
        """The places that it takes in a sequence: all tokens but the last enter the model."""
        return len(self.tokens) - 1

    @property
    def num_labels(self) -> int:
        """The tokens that are learned; the first one is none, as nothing comes before it."""
        return len(self.tokens) - self.first_label

    @property
    def first_label(self) -> int:
        """The index of the first token that is learned."""
        return max(1, self.num_given or 0)


@dataclass(frozen=True)
class Examples:
    """All examples of a text. num_cut: those that were longer than a sequence, and were cut."""

    train: list[Example]
    held_out: list[Example]
    num_cut: int


def load_examples(
    path: str, vocabulary: Vocabulary, *, sequence_length: int, end_id: int | None = None,
    held_out: float = 0.05,
) -> Examples:  # fmt: skip
    """Reads and tokenises the examples of a file, or of all files of a folder.

    Each line of a .jsonl file is an example: {"prompt": ..., "completion": ...}, of which the
    completion is learned, or {"text": ...}. Any other file is one text. Texts that are longer than
    a sequence are cut into several examples, which share the token between them; completions are
    cut off. A prompt and its completion are tokenised together, unless that changes the prompt's
    last token. The tokens that the tokenizer puts around a text come first, end_id last.

    held_out: the fraction of examples, at the end, that is not used for training.

    Raises: ValueError for a file that cannot be read, or a line that is no example, by its number.
    """
    files = find_text(path)
    found: list[Example] = []
    num_cut = 0
    for file in files:
        for where, prompt, text in _read(file):
            whole = _tokenize(prompt, text, vocabulary, end_id)
            if whole.num_labels < 1:
                raise ValueError(
                    f"{where}: expected at least two tokens, the second of which is learned, got "
                    f"{len(whole.tokens)}"
                )
            if whole.first_label > sequence_length:
                raise ValueError(
                    f"{where}: the prompt has {whole.num_given} tokens, which leave none of a "
                    f"sequence of {sequence_length} for the completion"
                )
            num_cut += whole.num_places > sequence_length
            found += _fit(whole, sequence_length)
    return _split(path, found, held_out, num_cut)


def stored_examples(
    tokens: Tokens, *, sequence_length: int, vocab_size: int, held_out: float = 0.05
) -> Examples:
    """Returns the documents of token files as examples, all of whose tokens are learned.

    Documents that are longer than a sequence are cut as `load_examples` cuts texts. All are read
    into memory. held_out: as there.

    Raises: ValueError, with the document's number, for one of fewer than two tokens; for a token
        that is not below vocab_size; and for a file that is damaged.
    """
    part = whole(tokens, vocab_size=vocab_size)
    starts = tokens.starts(np.arange(tokens.num_documents + 1, dtype=np.int64)).tolist()
    found: list[Example] = []
    num_cut = 0
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        if end - start < 2:
            raise ValueError(
                f"{tokens.name}: expected at least two tokens in each document, the second of "
                f"which is learned, got {end - start} in document {number}"
            )
        example = Example(part.read(start, end - start))
        num_cut += example.num_places > sequence_length
        found += _fit(example, sequence_length)
    return _split(tokens.name, found, held_out, num_cut)


def _split(name: str, found: list[Example], held_out: float, num_cut: int) -> Examples:
    cut = len(found) - int(len(found) * held_out)
    if not cut:
        raise ValueError(f"{name}: expected at least one example, got none")
    return Examples(found[:cut], found[cut:], num_cut)


def _read(file: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yields where each example is, its prompt if it has one, and what is to be learned."""
    try:
        if file.suffix != JSON_LINES:
            content = file.read_bytes()
            check_utf8(content, file)
            yield str(file), None, content.decode()
            return
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _parse(f"{file}, line {number}", line)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def _parse(where: str, line: bytes) -> tuple[str, str | None, str]:
    try:
        fields = parse_line(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; it begins {shown(line)}") from None
    prompt, completion, text = (fields.get(key) for key in ("prompt", "completion", "text"))
    if isinstance(prompt, str) and isinstance(completion, str) and completion:
        return where, prompt, completion
    if isinstance(text, str) and text and prompt is None and completion is None:
        return where, None, text
    raise ValueError(
        f"{where}: expected a prompt and a completion, or a text, as texts; it begins {shown(line)}"
    )


def _tokenize(prompt: str | None, text: str, vocabulary: Vocabulary, end_id: int | None) -> Example:
    end = [] if end_id is None else [end_id]

    def encode(text: str) -> list[int]:
        ids = vocabulary.encode_prompt(text)
        return ids[:-1] if end and ids[-1:] == end else ids  # some tokenizers add it themselves

    if prompt is None:
        return Example(np.asarray(encode(text) + end, dtype=np.int64))
    given, both = encode(prompt), encode(prompt + text)
    if both[: len(given)] != given:  # the last token of the prompt would be another one
        both = given + vocabulary.encode(text.encode()).tolist()
    return Example(np.asarray(both + end, dtype=np.int64), len(given))


def _fit(example: Example, sequence_length: int) -> list[Example]:
    """Returns the parts of an example that fit a sequence."""
    size, tokens = sequence_length + 1, example.tokens
    if example.num_given is not None:
        return [Example(tokens[:size], example.num_given)]
    starts = range(0, max(1, len(tokens) - 1), sequence_length)
    return [Example(tokens[start : start + size]) for start in starts]


def pack(
    examples: Sequence[Example], order: Sequence[int], sequence_length: int
) -> list[list[int]]:
    """Returns the numbers of the examples of each sequence, for examples taken in an order.

    Each goes into the oldest of the last _OPEN sequences that has room for it, else into a new one.
    """
    packed: list[list[int]] = []
    room: list[int] = []
    for number in order:
        needed = examples[number].num_places
        for place in range(max(0, len(packed) - _OPEN), len(packed)):
            if room[place] >= needed:
                packed[place].append(number)
                room[place] -= needed
                break
        else:
            packed.append([number])
            room.append(sequence_length - needed)
    return packed
