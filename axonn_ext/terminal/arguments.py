"""Numbers on the command line: types for argparse that know their range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

# Of a whole number that has no maximum of its own: beyond what any job has, and small enough that
# no arithmetic on counts overflows a float.
MOST = 10**12
MOST_THREADS = 1024  # of a process
MOST_PROCESSES = 1024  # on this machine


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """A whole number from `least` to `most`, which may be written as 4e6."""

    def parse(text: str) -> int:
        try:
            value = float(text)  # of thousands of digits, too
            number = int(text) if not value.is_integer() else int(value)
        except (ValueError, OverflowError):
            too_large = text.strip().lstrip("+").isdecimal()
            expected = f"<= {most}" if too_large else f">= {least}"
            raise _expected(f"a whole number {expected}", text) from None
        if number < least:
            raise _expected(f"a whole number >= {least}", text)
        if number > most:
            raise _expected(f"a whole number <= {most}", text)
        return number

    return parse


def number(
    *, above: float | None = None, least: float | None = None, most: float = math.inf
) -> Callable[[str], float]:
    """A finite number above `above`, from `least` on, up to `most`."""
    limits = [
        f"{sign} {limit:g}"
        for sign, limit in ((">", above), (">=", least), ("<=", most))
        if limit is not None and math.isfinite(limit)
    ]

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if (
            not math.isfinite(value)
            or value > most
            or (above is not None and value <= above)
            or (least is not None and value < least)
        ):
            raise _expected(" ".join(["a finite number", " and ".join(limits)]).strip(), text)
        return value

    return parse


def _expected(what: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {what}, got {text}")
