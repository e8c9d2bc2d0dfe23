"""Reads the text files that a user names: machines, models, configurations, metrics, results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from axonn_ext.spec.files.errors import InputError

T = TypeVar("T")
MOST_BYTES = 64 << 20  # no file of these kinds is larger; /dev/zero would be


class FileError(InputError):
    """A file cannot be read, or is not valid. The message names the file and the reason."""

    def __init__(self, file: object, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


def read_text(file: Path | Traversable, *, most_bytes: int = MOST_BYTES) -> str:
    """Returns the whole text of a file. Raises FileError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(most_bytes + 1)
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # the name has a zero byte in it
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
    """Returns the tables of a TOML file. Raises FileError."""
    import tomllib  # which ranks without a TOML file do not load

    return _parse(tomllib.loads, read_text(file), "TOML", file)


def parse_json(text: str, file: object) -> Any:
    """Returns the value of the JSON text of a file. Raises FileError."""
    return _parse(json.loads, text, "JSON", file)


def read_json(file: Path) -> Any:
    """Returns the value in a JSON file. Raises FileError."""
    return parse_json(read_text(file), file)


def _parse(parse: Callable[[str], T], text: str, kind: str, file: object) -> T:
    try:
        return parse(text)
    except ValueError as error:
        # Python's message for a number with too many digits ends with advice for programmers.
        reason = str(error).partition("; use sys.")[0]
        raise FileError(file, f"is not {kind}: {reason}") from None
    except RecursionError:
        raise FileError(file, f"is {kind} whose values are nested too deeply") from None


def open_new(path: Path) -> BinaryIO:
    """Opens a new file for writing, and replaces an existing one, such as a half-written one.

    It never writes through a link, which somebody else may have put there. Raises OSError.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for an impossible file name."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; False for an impossible folder name."""
    try:
        return path.is_dir()
    except OSError:
        return False
