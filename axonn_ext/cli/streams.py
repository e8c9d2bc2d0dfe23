"""Standard output and standard error, whatever they are: closed, full, or unable to show a text."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

READER_GONE = 141  # what a shell shows of a program that SIGPIPE ended


def prepare() -> None:
    """Makes both streams usable: one that is closed leads nowhere, and a character that one cannot
    show is written as its number."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if (
            stream is None
        ):  # Python found it closed; the next file to be opened would take its place
            _lead_nowhere(descriptor)
            setattr(sys, name, open(descriptor, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop(stream: TextIO) -> None:
    """Forgets what is not written yet, lest Python complains of it as it ends."""
    try:
        _lead_nowhere(stream.fileno())
        stream.flush()
    except (OSError, ValueError):
        pass  # it is no file of the system's, or closed already


def say(text: str) -> None:
    """Writes to standard error, in one piece, if that is possible."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        drop(sys.stderr)  # nobody listens


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
