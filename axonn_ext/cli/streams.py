"""Handles standard output and error streams that are closed, full or unable to show a text."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from axonn_ext.spec.files.errors import printable

READER_GONE = 141  # the status that a shell shows for a program that SIGPIPE ended


def prepare() -> None:
    """Makes both streams usable.

    The output of a closed stream is dropped, and a character that a stream cannot show is escaped.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if (
            stream is None
        ):  # Python found the stream closed; the next file to be opened would get its number
            _lead_nowhere(descriptor)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop(stream: TextIO) -> None:
    """Drops unwritten output, about which Python would complain at exit."""
    try:
        _lead_nowhere(stream.fileno())
        stream.flush()
    except (OSError, ValueError):
        pass  # the stream has no file descriptor, or is closed already


def say(text: str) -> None:
    """Writes to standard error, if possible in one piece, without terminal control codes."""
    try:
        sys.stderr.write(printable(text))
        sys.stderr.flush()
    except OSError:
        drop(sys.stderr)  # nobody reads it


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
