"""Rows that a command shows and writes as soon as they are known, so that none is lost."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import rich.console

from axonn_ext.spec.files.files import open_new
from axonn_ext.terminal.console import say
from axonn_ext.terminal.files import write_text, writing


class RowsFile:
    """A JSON file that is rewritten after each row, and is complete at any time.

    It is written under another name and renamed, so it stays readable if the run is killed. A file
    that cannot be replaced (a pipe, a link, a file in a folder without write permission, another
    user's file in /tmp) gets the last content when the `with` block ends. If `path` is None,
    nothing is written.

    `write` raises TrainingError, which names the option, if the file cannot be written.
    """

    def __init__(self, option: str, path: Path | None) -> None:
        self._option, self._path = option, path
        self._waiting: str | None = None

    def write(self, content: Mapping[str, Any]) -> None:
        """Replaces the file."""
        if self._path is None:
            return
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if not is_replaceable(self._path):
            self._waiting = text
            return
        part = self._path.with_name(f".{self._path.name}.part")
        with writing(self._option, self._path):
            try:
                with open_new(part) as file:
                    file.write(text.encode())
                if self._path.exists():
                    shutil.copymode(self._path, part)
                part.replace(self._path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._path is not None and self._waiting is not None:
            write_text(self._option, self._path, self._waiting)


def is_replaceable(path: Path) -> bool:
    """Whether a `RowsFile` writes the file after each row, and not only at the end."""
    is_file = not path.is_symlink() and (path.is_file() or not path.exists())
    return is_file and os.access(path.parent, os.W_OK) and not _is_protected(path)


def _is_protected(path: Path) -> bool:
    """Whether it is another user's file in a sticky folder such as /tmp, so cannot be renamed."""
    if not path.exists():
        return False
    folder = path.parent.stat()
    may_rename = (0, folder.st_uid, path.stat().st_uid)
    return bool(folder.st_mode & stat.S_ISVTX) and os.geteuid() not in may_rename


@dataclass(frozen=True)
class Column:
    """A column of a `RowsTable`: its title, and the width of its widest cell."""

    title: str
    width: int = 0
    is_number: bool = False

    def cell(self, text: str) -> str:
        """Returns the text, padded with spaces to the width of the column."""
        width = max(self.width, len(self.title))
        return text.rjust(width) if self.is_number else text.ljust(width)


class RowsTable:
    """A table whose rows are printed one by one, so its widths must be known before its cells.

    Text of unknown width belongs in the last column.
    """

    def __init__(self, console: rich.console.Console, columns: Sequence[Column]) -> None:
        self._console, self._columns = console, columns
        self._print([column.title for column in columns], "bold")

    def add(self, cells: Sequence[str], style: str = "") -> None:
        """Prints a row."""
        self._print(cells, style)

    def _print(self, cells: Sequence[str], style: str) -> None:
        texts = (column.cell(text) for column, text in zip(self._columns, cells, strict=True))
        say(self._console, "  ".join(texts).rstrip(), style)
