"""What the planner raises for requests that cannot be met."""

from __future__ import annotations


class PlannerError(ValueError):
    """A request that cannot be planned; the text says what was expected, or what would fit."""
