"""Changes single numbers of a machine's file, as in "levels.node.bytes_per_s=2e11"."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from axonn_ext.spec.files.errors import InputError, clipped, unknown

EXPECTED = "KEY=VALUE with a key of the machine's file, such as levels.node.bytes_per_s=2e11"


def changed(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Returns the values of a file with all changes made, in order.

    changes: KEY=VALUE each. The names of tables are joined by dots; an element of an array of
    tables is found by its `name` or its index from 0. The value is written as in TOML. The reader
    of the file decides which keys and values it accepts.

    Raises InputError for a malformed change, and for a table that does not exist.
    """
    result = copy.deepcopy(dict(values))
    for change in changes:
        key, equals, text = (part.strip() for part in change.partition("="))
        *path, last = key.split(".")
        if not equals or not all((*path, last)):
            raise InputError(f"expected {EXPECTED}, got {clipped(change)!r}")
        table: Any = result
        for place, name in enumerate(path):
            table = _inside(table, name, ".".join(path[: place + 1]))
        if not isinstance(table, dict):
            raise InputError(f"{'.'.join(path)} is not a table, so it has no {last}")
        table[last] = _value(text, change)
    return result


def _inside(table: Any, name: str, key: str) -> Any:
    """Returns the value of a table, or the element of an array, that has this name."""
    if isinstance(table, list):
        named = {str(e.get("name", i)): e for i, e in enumerate(table) if isinstance(e, dict)}
        named |= {str(i): element for i, element in enumerate(table) if str(i) not in named}
        if name not in named:
            raise unknown(f"element of {key.rpartition('.')[0]}", name, named)
        return named[name]
    if not isinstance(table, dict) or name not in table:
        inside = table.items() if isinstance(table, dict) else ()
        raise unknown("table", key, [k for k, v in inside if isinstance(v, dict | list)])
    return table[name]


def _value(text: str, change: str) -> Any:
    """Returns the value of a TOML text, refusing further keys on lines after the first."""
    try:
        values = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        values = {}
    if set(values) != {"value"}:
        raise InputError(
            f"expected a number, true, false or a quoted string, got {clipped(change)!r}"
        )
    return values["value"]
