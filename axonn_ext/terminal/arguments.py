"""Types for argparse that check the range of a number on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

# The maximum of whole numbers that have no maximum of their own. It is larger than any job needs,
# and small enough that no arithmetic on counts overflows a float.
MOST = 10**12
MOST_THREADS = 1024  # threads of one process
MOST_PROCESSES = 1024  # processes on this machine


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Returns a type for a whole number from `least` to `most`, which may be written like 4e6."""

    def parse(text: str) -> int:
        try:
            value = float(text)  # also accepts thousands of digits
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
    """Returns a type for a finite number > above, >= least and <= most."""
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
