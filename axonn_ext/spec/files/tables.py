"""Reads tables of a TOML file. Keys are read by name and checked; unknown keys are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from axonn_ext.spec.files.errors import InputError, clipped, unknown
from axonn_ext.spec.files.files import read_toml
from axonn_ext.spec.files.keys import Key

_MISSING: Any = object()
MOST_COUNT = 10**15  # a thousand times more bytes or tokens than any real count


def _shown(value: object) -> str:
    """Returns the value as Python writes it."""
    try:
        return clipped(repr(value))
    except (RecursionError, ValueError):  # for example a number of 5,000 digits
        return f"a value of type {type(value).__name__}"


class Table:
    """One table of a file. In messages, `where` is the path of the table in the file.

    All methods raise an InputError, which names file and key, for a value that is missing or of the
    wrong kind; numbers must be finite. `finish` raises one for keys that nobody has read.
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

    def _read(self, key: str, declared: Key, default: Any) -> Any:
        """Returns a value that the declared key allows, or the default, which is not checked."""
        value = self._get(key, default, declared.wanted(None))
        if declared.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not default and not declared.allows(value):
            raise self.error(key, declared.wanted(value))
        return value

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
        """Returns a string, which is not empty unless there is a default."""
        needed = bool if default is _MISSING else None
        return str(self._read(key, Key("", str, expected="a text", accepts=needed), default))

    def one_of(self, key: str, choices: tuple[str, ...], default: str = _MISSING) -> str:
        return str(self._read(key, Key("", str, choices=choices), default))

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        return bool(self._read(key, Key("", bool), default))

    def positive(self, key: str, default: float = _MISSING, *, most: float | None = None) -> float:
        """Returns a finite number above 0 and at most `most`."""
        return float(self._read(key, Key("", float, above=0, maximum=most), default))

    def at_least(
        self, key: str, least: float, default: float = _MISSING, *, most: float | None = None
    ) -> float:
        """Returns a finite number from `least` to `most`."""
        return float(self._read(key, Key("", float, minimum=least, maximum=most), default))

    def count(self, key: str, default: int = _MISSING, *, least: int = 1) -> int:
        """Returns a whole number up to MOST_COUNT, since sums of larger ones may not be floats."""
        return int(self._read(key, Key("", int, minimum=least, maximum=MOST_COUNT), default))

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
        self, names: tuple[str, ...], needed: tuple[str, ...] = (), *, most: float | None = None
    ) -> dict[str, float]:
        """Returns the values of those names that the table has; all must be positive numbers."""
        wanted = [name for name in names if name in needed or self.has(name)]
        found = {name: self.positive(name, most=most) for name in wanted}
        self._asked.update(names)
        self.finish()
        return found

    def read(self, readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
        """Returns the values of those keys that the table has, each converted by its reader.

        A reader raises ValueError, which says what is expected, for other values.
        """
        self._asked.update(readers)
        found = {}
        for key in readers:
            if key not in self._values:
                continue
            try:
                found[key] = readers[key](self._values[key])
            except ValueError as error:
                raise self.error(key, str(error)) from None
        return found

    def finish(self) -> None:
        for key in self._values:
            if key not in self._asked:
                place = f" in {self.where}" if self.where else ""
                raise InputError(f"{self.file}: {unknown(f'key{place}', key, self._asked)}")


def read_table(file: Path | Traversable) -> Table:
    """Returns a TOML file as a table. Raises InputError if it cannot be read or is not TOML."""
    return Table(read_toml(file), "", str(file))
