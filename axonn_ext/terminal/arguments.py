"""Parsers of commands, and types for argparse that check the range of a number."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from axonn_ext.spec.files.keys import MOST, Key, keys_of
from axonn_ext.terminal.errors import refuse_extra

MOST_THREADS = 1024  # threads of one process
MOST_PROCESSES = 1024  # processes on this machine


def new_parser(
    commands: argparse._SubParsersAction[Any], name: str, run: Callable[..., int], *,
    keys: Callable[[], Sequence[str]] | None = None, **texts: Any,
) -> argparse.ArgumentParser:  # fmt: skip
    """Adds a command, and returns its parser.

    run: returns the exit status for the arguments. keys: returns each TABLE.KEY for which it also
    takes arguments --TABLE.KEY, which the parser does not know. texts: those of add_parser.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **texts
    )

    def run_if_known(args: argparse.Namespace, extra: Sequence[str]) -> int:
        if keys is None:
            refuse_extra(parser, extra, action=getattr(args, "action", ""))
            return run(args)
        unknown = [word for word in extra if word[:2] == "--" and "." not in word.split("=")[0]]
        if unknown:
            refuse_extra(parser, unknown, keys=keys())
        return run(args, extra)

    parser.set_defaults(run=run_if_known)
    return parser


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Returns a type for a whole number from `least` to `most`, also in forms like 4e6."""
    return type_of(Key("", int, minimum=least, maximum=most))


def number(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Callable[[str], float]:
    """Returns a type for a finite number > above, >= least and <= most."""
    return type_of(Key("", float, above=above, minimum=least, maximum=most))


def type_of(key: Key) -> Callable[[str], Any]:
    """Returns a type for the values of a key."""

    def parse(text: str) -> Any:
        try:
            return key.read(_whole(text) if key.kind is int else key.parse(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {text}") from None

    return parse


def _whole(text: str) -> float | str:
    """Returns the number; infinity for thousands of digits, the text itself if it is no number."""
    try:
        return int(text)
    except ValueError:
        if text.strip().lstrip("+").isdecimal():
            return math.inf
    try:
        value = float(text)  # 1e12
    except ValueError:
        return text
    return int(value) if value.is_integer() else text


def add_key(
    parser: argparse._ActionsContainer, options: Any, name: str, *, flag: str = "", **more: Any
) -> None:
    """Adds the flag of an option, `--its-name`, with the bounds, choices and help of its `key`.

    more: other arguments of add_argument; without `default`, a flag that is not given is None.
    """
    key, default = keys_of(options)[name], getattr(options, name)
    more |= {"choices": key.choices} if key.choices else {"type": type_of(key)}
    parser.add_argument(
        flag or f"--{name.replace('_', '-')}", help=f"{key.doc} (default: {default})", **more
    )
