"""Examples for fine-tuning: prompts with completions, chats, and texts, with their labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_ext.data.orders import check_sequence_length
from axonn_ext.data.source import check_utf8, find_text
from axonn_ext.data.tokens import Tokens, whole
from axonn_ext.data.units import JSON_LINES, parse_line, shown
from axonn_ext.data.vocabulary import TokenArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from axonn_ext.data.prompts import Prompts  # loads jinja2, which only chats need

_OPEN = 16  # larger values waste less room, but change the order more
_FIELDS = 'an object with "prompt" and "completion", or "text", all strings, or "messages"'
NOTHING_TO_LEARN = "nothing to learn"
NO_ROOM = "no room for learned tokens"


@dataclass(frozen=True)
class Example:
    """Tokens, and which of them are learned; None: a text, where all are learned."""

    tokens: TokenArray
    learned: NDArray[np.bool_] | None = None

    @property
    def num_places(self) -> int:
        """Number of places in a sequence: all tokens but the last enter the model."""
        return len(self.tokens) - 1

    @property
    def has_label(self) -> NDArray[np.bool_]:
        """Whether each place has a label, the next token. The first token is never a label."""
        if self.learned is None:
            return np.ones(max(0, self.num_places), dtype=np.bool_)
        return self.learned[1:]

    @property
    def num_labels(self) -> int:
        """Number of tokens that are learned."""
        return int(self.has_label.sum())


@dataclass(frozen=True)
class Skipped:
    """Skipped examples: the reason, the number, and the place of the first one."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Examples:
    """All examples of a text. num_cut: number of examples cut to fit a sequence."""

    train: list[Example]
    held_out: list[Example]
    num_cut: int
    skipped: tuple[Skipped, ...] = ()


def load_examples(
    path: str, prompts: Prompts, *, sequence_length: int, held_out: float = 0.05,
    skips: bool = True,
) -> Examples:  # fmt: skip
    """Reads and tokenises the examples of a file, or of all files of a folder.

    Each line of a .jsonl file is an example: {"prompt": ..., "completion": ...}, where the
    completion is learned, {"messages": [...]}, where the assistant's turns are learned, or
    {"text": ...}. Any other file is one text. Texts longer than a sequence are cut into several
    examples, which share the token at the cut; other examples are truncated.

    held_out: the fraction of examples, at the end, that is not used for training. skips: leaves
    out examples with nothing to learn, or with nothing to learn within a sequence.

    Raises: ValueError for a sequence_length below 1, a file that cannot be read, or a line (by
        number) that is not an example; without skips also for an example that would be left out.
    """
    gathered = _Gathered(path, sequence_length, skips)
    for file in find_text(path):
        for where, fields in _read(file):
            try:
                example = _encoded(fields, prompts)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            gathered.add(where, example)
    return gathered.split(held_out)


def stored_examples(
    tokens: Tokens, *, sequence_length: int, vocab_size: int, held_out: float = 0.05,
    skips: bool = True,
) -> Examples:  # fmt: skip
    """Returns the documents of token files as examples, all of whose tokens are learned.

    Documents longer than a sequence are cut as in `load_examples`. All are read into memory.
    held_out, skips: as there.

    Raises: ValueError for a sequence_length below 1; for a token that is not below vocab_size; for
        a damaged file; and without skips for a document of fewer than two tokens.
    """
    part = whole(tokens, vocab_size=vocab_size)
    starts = tokens.starts(np.arange(tokens.num_documents + 1, dtype=np.int64)).tolist()
    gathered = _Gathered(tokens.name, sequence_length, skips)
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        example = Example(part.read(start, end - start))
        gathered.add(f"{tokens.name}, document {number}", example)
    return gathered.split(held_out)


class _Gathered:
    """The examples read so far, and those left out."""

    def __init__(self, name: str, sequence_length: int, skips: bool) -> None:
        check_sequence_length(sequence_length)
        self._name, self._length, self._skips = name, sequence_length, skips
        self._found: list[Example] = []
        self._left_out: dict[str, list[str]] = {}
        self._num_cut = 0

    def add(self, where: str, example: Example) -> None:
        """Adds an example, as parts that fit a sequence, or leaves it out."""
        num_places = example.num_places
        if example.num_labels < 1:
            self._leave_out(
                where, NOTHING_TO_LEARN,
                "expected at least two tokens, and one to learn after the first, got "
                f"{len(example.tokens)} with none to learn",
            )  # fmt: skip
        elif not example.has_label[: self._length].any():
            self._leave_out(
                where, NO_ROOM,
                f"the prompt has {int(example.has_label.argmax()) + 1} tokens, which leave none of "
                f"a sequence of {self._length} for learned tokens",
            )  # fmt: skip
        else:
            self._num_cut += num_places > self._length
            self._found += _fit(example, self._length)

    def split(self, held_out: float) -> Examples:
        """Returns all examples. Raises ValueError if there is none for training."""
        skipped = tuple(
            Skipped(reason, len(places), places[0]) for reason, places in self._left_out.items()
        )
        cut = len(self._found) - int(len(self._found) * held_out)
        if not cut:
            left = "".join(f"; {e.count:,} have {e.reason} (first: {e.first})" for e in skipped)
            raise ValueError(f"{self._name}: expected at least one example, got none{left}")
        return Examples(self._found[:cut], self._found[cut:], self._num_cut, skipped)

    def _leave_out(self, where: str, reason: str, why: str) -> None:
        if not self._skips:
            raise ValueError(f"{where}: {why}")
        self._left_out.setdefault(reason, []).append(where)


def _read(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each example's place and fields."""
    try:
        if file.suffix != JSON_LINES:
            content = file.read_bytes()
            check_utf8(content, file)
            yield str(file), {"text": content.decode()}
            return
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}, line {number}", _parse(f"{file}, line {number}", line)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def _parse(where: str, line: bytes) -> Mapping[str, Any]:
    """Returns the fields of a line; they must be those of one kind of example."""
    try:
        fields = parse_line(line)
        keys = ("prompt", "completion", "text", "messages")
        given = {key for key in keys if fields.get(key) is not None}
        strings = all(isinstance(fields[key], str) for key in given - {"messages"})
        if not strings or given not in ({"prompt", "completion"}, {"text"}, {"messages"}):
            raise ValueError(f"expected {_FIELDS}")
    except ValueError as error:
        raise ValueError(f"{where}: {error}; it begins {shown(line)}") from None
    return fields


def _encoded(fields: Mapping[str, Any], prompts: Prompts) -> Example:
    if fields.get("messages") is not None:
        ids, learned = prompts.chat(fields)
    elif fields.get("text") is not None:
        ids = prompts.text(fields["text"]) if fields["text"] else []
        return Example(np.asarray(ids, dtype=np.int64))
    else:
        ids, num_given = prompts.completed(fields["prompt"], fields["completion"])
        learned = np.arange(len(ids)) >= num_given
        if not fields["completion"]:
            learned[:] = False
    return Example(np.asarray(ids, dtype=np.int64), learned)


def _fit(example: Example, sequence_length: int) -> list[Example]:
    """Returns the parts of an example that fit a sequence."""
    size, tokens = sequence_length + 1, example.tokens
    if example.learned is not None:
        return [Example(tokens[:size], example.learned[:size])]
    starts = range(0, len(tokens) - 1, sequence_length)
    return [Example(tokens[start : start + size]) for start in starts]


def pack(
    examples: Sequence[Example], order: Sequence[int], sequence_length: int
) -> list[list[int]]:
    """Packs examples in the given order; returns the numbers of the examples in each sequence.

    Each goes into the oldest of the last _OPEN sequences with enough room, else into a new one.

    Raises: ValueError for a sequence_length below 1, and for an example that is longer.
    """
    check_sequence_length(sequence_length)
    packed: list[list[int]] = []
    room: list[int] = []
    for number in order:
        needed = examples[number].num_places
        if needed > sequence_length:
            raise ValueError(
                f"example {number}: expected at most {sequence_length} + 1 tokens, which fit a "
                f"sequence, got {needed + 1}"
            )
        for place in range(max(0, len(packed) - _OPEN), len(packed)):
            if room[place] >= needed:
                packed[place].append(number)
                room[place] -= needed
                break
        else:
            packed.append([number])
            room.append(sequence_length - needed)
    return packed
