"""Checks a command's output files before any work, and reports failures in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axonn_ext.terminal.errors import TrainingError, UserError

PICTURES = (".png", ".svg", ".pdf")


def check_writable(option: str, path: Path | None) -> None:
    """Raises UserError, before anything is computed, for a file that cannot be written.

    A file that exists is not changed; one that does not exist is created and removed again.
    """
    if path is None:
        return
    try:
        _try_to_open(path)
    except IsADirectoryError:
        raise UserError(f"{option}: expected a file, but {path} is a folder") from None
    except OSError as error:
        folder = path.absolute().parent
        if error.errno == errno.ENOENT and not folder.is_dir():
            raise UserError(f"{option}: there is no folder {folder}") from None
        raise UserError(f"{option}: cannot write {path}: {error.strerror}") from None


def check_picture(option: str, path: Path | None) -> None:
    """Does the same for a picture, and checks that the file's suffix is a known format."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise UserError(f"{option}: expected a name ending in .png, .svg or .pdf, got {path}")
    check_writable(option, path)


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns errors of writing a file, in its body, into TrainingError.

    The message names the option and the file. Writing can fail although `check_writable` passed,
    for example if the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{option}: cannot write {path}: {error.strerror or error}; it is not complete"
        ) from None


def write_text(option: str, path: Path, text: str) -> None:
    """Writes the whole file. Raises TrainingError."""
    with writing(option, path):
        # File names may hold bytes that are not UTF-8.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def make_folder(option: str, folder: Path) -> None:
    """Makes the folder and those above it. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot make {folder}: {error.strerror}") from None


def _try_to_open(path: Path) -> None:
    if path.exists():
        if path.is_file() or path.is_dir():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        elif not os.access(path, os.W_OK):  # not opened, since a pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    if path.is_symlink():  # its target does not exist, and writing would create it
        path = Path(os.path.realpath(path))  # Path.resolve raises no OSError for circular links
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    path.unlink()
