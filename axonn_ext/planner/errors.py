"""The error that the planner raises for requests that it cannot fulfil."""

from __future__ import annotations

MAX_SHOWN = 100  # the most characters of a value in a message, as in settings.py


class PlannerError(ValueError):
    """A request cannot be planned. The message says what was expected, or what would fit."""


def clipped(text: str) -> str:
    """Returns the text of a value for a message, shortened to MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
