"""Reads the text files that a user names: machines, models, configurations, metrics, results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from axonn_ext.planner.errors import PlannerError

T = TypeVar("T")
MOST_BYTES = 64 << 20  # no file of these kinds is larger; /dev/zero is


class FileError(PlannerError):
    """A file that cannot be read, or is not what it should be; the text names it, and says why."""

    def __init__(self, file: object, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


def read_text(file: Path | Traversable, *, most_bytes: int = MOST_BYTES) -> str:
    """The whole text. Raises FileError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(most_bytes + 1)
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a name with a zero in it
        raise FileError(file, f"cannot be read: {error}") from None
    if len(content) > most_bytes:
        raise FileError(file, f"is larger than {most_bytes >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise FileError(
            file, f"is not text: byte {error.start} is {byte:#04x}, which is not UTF-8"
        ) from None


def read_toml(file: Path | Traversable) -> dict[str, Any]:
    """The tables of a TOML file. Raises FileError."""
    return _parse(tomllib.loads, read_text(file), "TOML", file)


def parse_json(text: str, file: object) -> Any:
    """The value that the text of a file stands for. Raises FileError."""
    return _parse(json.loads, text, "JSON", file)


def read_json(file: Path) -> Any:
    """The value in a JSON file. Raises FileError."""
    return parse_json(read_text(file), file)


def _parse(parse: Callable[[str], T], text: str, kind: str, file: object) -> T:
    try:
        return parse(text)
    except ValueError as error:
        # Of Python's message for a number with too many digits, what concerns the user.
        reason = str(error).partition("; use sys.")[0]
        raise FileError(file, f"is not {kind}: {reason}") from None
    except RecursionError:
        raise FileError(file, f"is not {kind} of ours: its values are nested too deeply") from None


def is_file(path: Path) -> bool:
    """Whether there is such a file; no error for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """The same for a folder."""
    try:
        return path.is_dir()
    except OSError:
        return False
