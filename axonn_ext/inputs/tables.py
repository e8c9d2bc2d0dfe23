"""Reads tables of a TOML file. Keys are asked for by name and checked; others are refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from axonn_ext.inputs.errors import InputError, clipped, unknown
from axonn_ext.inputs.files import read_toml

_MISSING: Any = object()
MOST_COUNT = 10**15  # a thousand times more bytes, or tokens, than anything has


def _shown(value: object) -> str:
    """Returns the value as Python writes it."""
    try:
        return clipped(repr(value))
    except (RecursionError, ValueError):  # for example a number of 5,000 digits
        return f"a value of type {type(value).__name__}"


class Table:
    """One table of a file. In messages, `where` is the path of the table in the file.

    All methods raise a InputError, which names file and key, for a value that is missing or is
    not of the kind that is asked for; numbers must be finite. `finish` raises one for keys that
    nobody has asked for.
    """

    def __init__(self, values: object, where: str, file: str) -> None:
        self.file, self.where = file, where
        if not isinstance(values, Mapping):
            place = f"{where} " if where else ""
            raise InputError(f"{file}: {place}must be a table, got {_shown(values)}")
        self._values: Mapping[str, Any] = values
        self._asked: set[str] = set()

    def name_of(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def error(self, key: str, expected: str) -> InputError:
        got = f", got {_shown(self._values[key])}" if key in self._values else "; it is missing"
        return InputError(f"{self.file}: {self.name_of(key)} must be {expected}{got}")

    def _get(self, key: str, default: Any, expected: str) -> Any:
        self._asked.add(key)
        if key not in self._values and default is _MISSING:
            raise self.error(key, expected)
        return self._values.get(key, default)

    def has(self, key: str) -> bool:
        return key in self._values

    def without(self, keys: Iterable[str]) -> Table:
        """Returns the table without these keys, whatever their values are."""
        left_out = frozenset(keys)
        values = {key: value for key, value in self._values.items() if key not in left_out}
        return Table(values, self.where, self.file)

    def without_nulls(self) -> Table:
        """Returns the table without the keys whose values are JSON's null."""
        return self.without(key for key, value in self._values.items() if value is None)

    def text(self, key: str, default: str = _MISSING) -> str:
        value = self._get(key, default, "a text")
        if not isinstance(value, str) or (default is _MISSING and not value):
            raise self.error(key, "a text")
        return value

    def one_of(self, key: str, choices: tuple[str, ...], default: str = _MISSING) -> str:
        value = self._get(key, default, f"one of {', '.join(choices)}")
        if value != default and value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}")
        return str(value)

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def positive(self, key: str, default: float = _MISSING, *, most: float = math.inf) -> float:
        """Returns a finite number above 0 and at most `most`."""
        limit = "" if most == math.inf else f" and <= {most:g}"
        return self._number(key, default, f"a finite number > 0{limit}", above=0, most=most)

    def at_least(
        self, key: str, least: float, default: float = _MISSING, *, most: float = math.inf
    ) -> float:
        """Returns a finite number from `least` to `most`."""
        limit = "" if most == math.inf else f" and <= {most:g}"
        expected = f"a finite number >= {least:g}{limit}"
        return self._number(key, default, expected, least=least, most=most)

    def _number(
        self, key: str, default: float, expected: str, *, above: float = -math.inf,
        least: float = -math.inf, most: float,
    ) -> float:  # fmt: skip
        value = self._get(key, default, expected)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # An integer of 400 digits is below infinity, but cannot be a float.
        most = min(most, sys.float_info.max)
        if not (number and above < value <= most and value >= least):
            raise self.error(key, expected)
        return float(value)

    def count(self, key: str, default: int = _MISSING, *, least: int = 1) -> int:
        """Returns a whole number up to MOST_COUNT, since sums of larger ones may not be floats."""
        value = self._get(key, default, f"a whole number >= {least}")
        whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < least:
            raise self.error(key, f"a whole number >= {least}")
        if value > MOST_COUNT:
            raise self.error(key, f"a whole number <= {MOST_COUNT}")
        return int(value)

    def table(self, key: str) -> Table:
        value = self._get(key, _MISSING, "a table")
        return Table(value, self.name_of(key), self.file)

    def tables(self, key: str) -> Iterator[Table]:
        """Yields the tables of an array; none if the key is missing."""
        values = self._get(key, [], "an array of tables")
        if not isinstance(values, list):
            raise self.error(key, "an array of tables")
        for i, value in enumerate(values):
            yield Table(value, f"{self.name_of(key)}[{i}]", self.file)

    def list(self, key: str) -> list[Any]:
        """Returns a list, empty if the key is missing; the caller must check its elements."""
        value = self._get(key, [], "an array")
        if not isinstance(value, list):
            raise self.error(key, "an array")
        return value

    def numbers(
        self, names: tuple[str, ...], needed: tuple[str, ...] = (), *, most: float = math.inf
    ) -> dict[str, float]:
        """Returns those of the names that the table has, all of which must be positive numbers."""
        wanted = [name for name in names if name in needed or self.has(name)]
        found = {name: self.positive(name, most=most) for name in wanted}
        self._asked.update(names)
        self.finish()
        return found

    def finish(self) -> None:
        for key in self._values:
            if key not in self._asked:
                place = f" in {self.where}" if self.where else ""
                raise InputError(f"{self.file}: {unknown(f'key{place}', key, self._asked)}")


def read_table(file: Path | Traversable) -> Table:
    """Returns a TOML file as a table. Raises InputError if it cannot be read or is not TOML."""
    return Table(read_toml(file), "", str(file))
