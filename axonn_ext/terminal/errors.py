"""The exceptions that commands show as messages: user mistakes, and failures of a run."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

from axonn_ext.spec.files.errors import hint


class UserError(Exception):
    """A mistake that the user can correct. Only its message is shown; the exit status is 2.

    `problems` are independent of each other, and each is shown on its own line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def refuse_extra(
    parser: ArgumentParser, extra: Sequence[str], *, action: str = "", keys: Sequence[str] = ()
) -> None:
    """Raises UserError if the command line has arguments that the command does not know.

    action: what the command was to do, if it has actions. keys: each TABLE.KEY that it also knows.
    """
    if extra:
        near = _nearest_flag(parser, extra[0], keys)
        command = f"{parser.prog} {action}".rstrip()
        raise UserError(f"unknown argument {extra[0]}{near} (see {command} --help)")


def _nearest_flag(parser: ArgumentParser, argument: str, keys: Sequence[str]) -> str:
    """Returns a hint at the flag or key that is most similar; "" if none is."""
    if not argument.startswith("--"):
        return ""
    flag, flags = argument.partition("=")[0], _flags(parser)
    name = flag[2:].replace("-", "_")
    same = [each for each in flags if each[2:].replace("-", "_") == name]
    same = same or [f"--{key}" for key in keys if key.partition(".")[2] == name]
    return f" (did you mean {' or '.join(same)}?)" if same else hint(flag, flags)


def _flags(parser: ArgumentParser) -> list[str]:
    """Returns the flags of a parser and of its subcommands."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
        if isinstance(action.choices, Mapping):  # subcommands
            flags += [flag for inner in action.choices.values() for flag in _flags(inner)]
    return flags


class MeetingError(UserError):
    """The ranks cannot connect to each other, so no rank can tell another about it."""


class TrainingError(Exception):
    """A run cannot continue, for the reason in the message; the exit status is 1."""


class WorkerUserError(Exception):
    """The started processes found and printed a mistake by the user; the exit status is 2."""


class OutputClosed(Exception):
    """Nobody reads the output of the started processes any more; all end without a message."""
