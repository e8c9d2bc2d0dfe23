"""The error for unusable input from a user, and how messages show values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

MAX_SHOWN = 100  # the most characters of a value in a message
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class InputError(ValueError):
    """A file or a value cannot be used. The message says what was expected and what was given."""


def printable(text: str) -> str:
    """Returns the text with characters that would control a terminal replaced by escapes.

    These are the control characters of ASCII and Latin-1, except tab and line feed, and those that
    change the direction of text. A file or another machine may have put them into a name or a
    message.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def clipped(text: str) -> str:
    """Returns the text of a value for a message, shortened to MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Returns the names for a message: all, or the first ones and the number of others."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def hint(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the known name that is most similar; "" if none is."""
    names = {each.lstrip("-"): each for each in known}  # the dashes of flags are not alike
    nearest = difflib.get_close_matches(name.lstrip("-"), list(names), n=1, cutoff=0.5)
    return f" (did you mean {names[nearest[0]]}?)" if nearest else ""


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """Returns an error for an unknown name, which suggests the most similar known one."""
    names = sorted(known)
    return InputError(f"unknown {what} {name!r}{hint(name, names)}; known: {', '.join(names)}")
