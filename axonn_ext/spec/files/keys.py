"""Options, each declared once: its default, its meaning and its legal values.

A frozen dataclass declares them as fields and checks them itself:

    layout: str = key("sharded", "layout of activations", choices=LAYOUTS)

    def __post_init__(self) -> None:
        check(self)

The trainer's tables, flags and help, and the planner's reader of the trainer's files, are made from
the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

# The maximum, in files and command lines, of whole numbers that declare none. It is larger than any
# job needs, and small enough that no arithmetic on counts overflows a float.
MOST = 10**12
_INT64 = 2**63 - 1
_MOST_NUMBER = 3.4e38  # a larger number is infinite in fp32
_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The meaning of an option, and its legal values.

    kind: int, float, bool, str or tuple. optional: whether None is legal, which files write as 0.
    expected, accepts: for values of a special form: its description, and a check for it.
    row: the dataclass of the elements of a tuple, which files write as an array of tables.
    """

    doc: str
    kind: Any
    optional: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive minimum
    expected: str = ""
    accepts: Callable[[Any], bool] | None = None
    row: Any = None

    def allows(self, value: Any, most: int = _INT64) -> bool:
        """Whether the value is legal. most: the maximum of whole numbers that declare none."""
        kind = self.kind
        if value is None:
            return self.optional
        if self.row is not None:
            return isinstance(value, tuple) and all(isinstance(each, self.row) for each in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) != (kind is bool):
            return False
        if not isinstance(value, (int, float) if kind is float else kind):
            return False
        if self.accepts is not None and not self.accepts(value):
            return False
        if kind is bool:
            return True
        if kind is str:
            return _is_unicode(str(value))
        largest = self._largest(most)
        return (
            -largest <= value <= largest  # not so for nan
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
        )

    def wanted(self, value: Any, most: int = _INT64) -> str:
        """Returns a description of what is expected instead of an illegal value."""
        if self.row is not None:
            return "an array of tables"
        text = _WORDS[self.kind]
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.expected:
            return self.expected
        if self.kind is str and isinstance(value, str):
            return "text in UTF-8, without zeros"
        largest = self._largest(most)
        whole = self.kind is int
        tells_largest = whole or (self.kind is float and self.maximum is None and value != math.inf)
        if type(value) in (int, float) and value > largest and tells_largest:
            return f"{text} <= {largest}"
        bounds = ((">=", self.minimum), (">", self.above), ("<=", None if whole else self.maximum))
        limits = [f"{sign} {limit:g}" for sign, limit in bounds if limit is not None]
        return " ".join([text, " and ".join(limits)]).strip()

    def read(self, value: Any) -> Any:
        """Returns the meaning of a file's value. Raises ValueError, which says what is expected."""
        if self.optional and type(value) in (int, float) and value == 0:
            return None
        if not self.allows(value, MOST):
            raise ValueError(f"{'0 or ' if self.optional else ''}{self.wanted(value, MOST)}")
        return float(value) if self.kind is float else value

    def parse(self, text: str) -> Any:
        """Returns the value of a command-line text, or the text itself if it cannot be parsed."""
        if self.row is not None:
            import tomllib  # only here, as ranks rarely need it

            try:
                return tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                return text
        if self.kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return self.kind(text)
        except ValueError:
            return text

    def _largest(self, most: int) -> float:
        if self.maximum is not None:
            return self.maximum
        return most if self.kind is int else _MOST_NUMBER


def key(default: T, doc: str, *, kind: type = int, **limits: Any) -> T:
    """Declares a field, with the limits of `Key`. kind: that of a field whose default is None."""
    optional = default is None
    return field(
        default=default,
        metadata=about(doc, kind if optional else type(default), optional=optional, **limits),
    )


def about(doc: str, kind: type, **limits: Any) -> dict[str, Key]:
    """Returns the metadata that `key` adds to a field, for a field without a default."""
    return {"key": Key(doc, kind, **limits)}


def keys_of(options: Any) -> dict[str, Key]:
    """Returns the keys of a dataclass, by name."""
    return {each.name: each.metadata["key"] for each in fields(options) if "key" in each.metadata}


def check(options: Any, of: str = "") -> None:
    """Raises ValueError, which names the option, for the first illegal value.

    of: a prefix of the name.
    """
    for each in fields(options):
        declared, value = each.metadata.get("key"), getattr(options, each.name)
        if declared is not None and not declared.allows(value):
            raise ValueError(f"{of}{each.name} must be {declared.wanted(value)}, got {value!r}")


def _is_unicode(text: str) -> bool:
    """Whether TOML can hold the text: it cannot hold names of files whose bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text
