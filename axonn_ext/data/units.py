"""Cuts a corpus into units of work of a few MB, which depend only on the text.

A text file is one document; a .jsonl file has one in a field of each line. A file larger than a
unit is cut where any process can find the cut independently: lines belong to the stretch of
UNIT_BYTES in which they begin, and long texts are cut by `cut_after`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from axonn_ext.data.source import check_utf8

UNIT_BYTES = 1 << 22
JSON_LINES = ".jsonl"
_WORDS = re.compile(rb"(?<=[A-Za-z]) (?=[A-Za-z])")
# A line end between UTF-8 characters that are not spaces: how a tokenizer groups several spaces
# depends on whether the text continues.
_LINES = re.compile(
    rb"(?<![\x00-\x20\x7f])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)\n(?=[!-~\xc3-\xdf\xe4-\xf4])"
)
_BEFORE = 4  # number of bytes before a cut that decide about it


@dataclass(frozen=True)
class Files:
    """Whole text files, one after the other."""

    paths: tuple[Path, ...]
    num_bytes: int


@dataclass(frozen=True)
class Stretch:
    """The part of a file that belongs to its bytes first .. first + UNIT_BYTES - 1."""

    path: Path
    first: int
    num_bytes: int
    field: str | None  # of JSON lines; None: a text


Unit = Files | Stretch


@dataclass(frozen=True)
class Piece:
    """A document's text or a piece of it, and whether the document begins and ends there."""

    text: bytes
    begins: bool = True
    ends: bool = True


def find_units(files: list[Path], field: str) -> list[Unit]:
    """Returns the units of files in order. Raises ValueError for a file that is gone."""
    units: list[Unit] = []
    small: list[Path] = []
    small_bytes = 0

    def close() -> None:
        nonlocal small_bytes
        if small:
            units.append(Files(tuple(small), small_bytes))
        small.clear()
        small_bytes = 0

    for path in files:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        lines = path.suffix == JSON_LINES
        if lines or size > UNIT_BYTES:
            close()
            units += [
                Stretch(path, first, min(UNIT_BYTES, size - first), field if lines else None)
                for first in range(0, size, UNIT_BYTES)
            ]
        else:
            small.append(path)
            small_bytes += size
            if small_bytes >= UNIT_BYTES:
                close()
    close()
    return units


def read_unit(unit: Unit, *, any_bytes: bool = True) -> Iterator[Piece]:
    """Yields the documents of a unit; documents longer than UNIT_BYTES come in pieces.

    Raises: ValueError for a file that cannot be read, for a line (by number) without a document,
        and, unless any_bytes, for a file that is not UTF-8.
    """
    if isinstance(unit, Files):
        for path in unit.paths:
            with _opened(path) as stream:
                content = stream.read()
                if not any_bytes:
                    check_utf8(content, path)
                yield Piece(content)
        return
    with _opened(unit.path) as stream:
        if unit.field is None:
            for first, piece in _text(stream, unit):
                if not any_bytes:
                    check_utf8(piece.text, unit.path, first=first)
                yield piece
        else:
            yield from _lines(stream, unit, unit.field)


def cut_after(text: bytes | bytearray, start: int, end: int) -> int | None:
    """Returns the first place in [start, end) where a long text is cut; None if there is none.

    The cut is before the space between two words of ASCII letters. Tokenizers that join a word with
    the space before it, as all byte-level ones do, have a token boundary there, so that cutting
    changes no token. In a stretch without such words, the cut is after a single line end.
    """
    end = min(len(text), end)
    match = _WORDS.search(text, start, end)
    if match is not None:
        return match.start()
    match = _LINES.search(text, max(0, start - 1), end)
    return None if match is None else match.end()


def pieces(text: bytes) -> Iterator[bytes]:
    """Yields the pieces of a whole text, cut as `read_unit` cuts it."""
    begin = 0
    for start in range(UNIT_BYTES, len(text), UNIT_BYTES):
        cut = cut_after(text, start, start + UNIT_BYTES)
        if cut is not None:
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _text(stream: BinaryIO, unit: Stretch) -> Iterator[tuple[int, Piece]]:
    """Yields the text from this stretch's cut to the cut of a later stretch, with its first byte.

    Yields nothing if this stretch has no cut.
    """
    back = min(_BEFORE, unit.first)
    stream.seek(unit.first - back)
    text = bytearray(stream.read(back + UNIT_BYTES))
    begin = 0
    if unit.first:
        cut = cut_after(text, back, back + UNIT_BYTES)
        if cut is None:
            return
        begin = cut
    end = back + UNIT_BYTES  # end, in `text`, of the last searched stretch
    while True:
        more = stream.read(UNIT_BYTES)
        text += more
        cut = cut_after(text, end, end + UNIT_BYTES)
        if cut is not None or not more:
            piece = Piece(bytes(text[begin:cut]), begins=not unit.first, ends=cut is None)
            yield unit.first - back + begin, piece
            return
        end += UNIT_BYTES


def _lines(stream: BinaryIO, unit: Stretch, field: str) -> Iterator[Piece]:
    """Yields the document of each line that begins in this stretch."""
    if unit.first:
        stream.seek(unit.first - 1)
        skipped = stream.readline(UNIT_BYTES + 1)
        if not skipped.endswith(b"\n"):
            return  # no line begins here
    left = unit.first + unit.num_bytes - stream.tell()
    if left <= 0:
        return
    offset = stream.tell()
    block = stream.read(left)
    if not block.endswith(b"\n"):
        block += stream.readline()
    for line in block.split(b"\n"):
        if line.strip():
            parts = list(pieces(_document(line, unit.path, offset, field)))
            for number, part in enumerate(parts, start=1):
                yield Piece(part, begins=number == 1, ends=number == len(parts))
        offset += len(line) + 1


def parse_line(line: bytes) -> dict[str, Any]:
    """Returns the object in a line of JSON. Raises ValueError, which says what is wrong.

    JSON can contain lone surrogates, which UTF-8 lacks; in texts they become question marks.
    """
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError("expected JSON that is not nested so deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"expected JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return {key: whole_text(v) if isinstance(v, str) else v for key, v in value.items()}


def whole_text(text: str) -> str:
    """Returns the text with question marks in place of lone surrogates."""
    return text.encode("utf-8", errors="replace").decode()


def _document(line: bytes, path: Path, offset: int, field: str) -> bytes:
    try:
        value = parse_line(line)
        if field not in value:
            names = ", ".join(list(value)[:8]) or "none"
            raise ValueError(f"expected a field {field}, got {names}")
        if not isinstance(value[field], str):
            raise ValueError(f"expected text in the field {field}")
        return str(value[field]).encode()
    except ValueError as error:
        number = _line_number(path, offset)
        raise ValueError(f"{path}, line {number:,}: {error}; it begins {shown(line)}") from None


def _line_number(path: Path, offset: int) -> int:
    """Returns the number of the line that begins at this byte."""
    count = 1
    with path.open("rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 20))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def shown(line: bytes) -> str:
    """Returns the beginning of a line, for a message."""
    line = line.strip()
    text = line[:40].decode("utf-8", errors="replace")
    return ascii(text + ("..." if len(line) > 40 else ""))
