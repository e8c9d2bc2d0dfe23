"""The error that the planner raises for requests that it cannot fulfil."""

from __future__ import annotations

from axonn_ext.spec.files.errors import InputError


class PlannerError(InputError):
    """A request cannot be planned. The message says what was expected, or what would fit."""
