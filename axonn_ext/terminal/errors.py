"""The mistake of a user, as opposed to a failure of ours."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can put right; shown as its message alone, with exit status 2.

    `problems` are independent of each other and shown one a line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def refuse_extra(command: str, extra: Sequence[str]) -> None:
    """Raises UserError if the command line has arguments that the command does not know."""
    if extra:
        raise UserError(f"unknown argument {extra[0]} (see axonn-ext {command} --help)")


class MeetingError(UserError):
    """The ranks do not meet, so that none can be told of it."""


class TrainingError(Exception):
    """A run that cannot go on, explained by its message; exit status 1."""


class WorkerUserError(Exception):
    """The processes that were started found a mistake of the user, and have said so; status 2."""


class OutputClosed(Exception):
    """Whoever read the output of the processes that were started has gone: all end, quietly."""
