"""What the planner raises for requests that cannot be met."""

from __future__ import annotations

MAX_SHOWN = 100  # characters of a value in a message; settings.py, which is below, has its own


class PlannerError(ValueError):
    """A request that cannot be planned; the text says what was expected, or what would fit."""


def clipped(text: str) -> str:
    """The text of a value, for a message, not at any length."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
