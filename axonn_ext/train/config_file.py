"""Reads a `Config` from a TOML file and dotted overrides, and writes it as TOML.

Messages about mistakes name the key, the expected and the given value, and where it came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from axonn_ext.spec.files.errors import clipped, hint
from axonn_ext.spec.files.files import FileError, read_toml
from axonn_ext.spec.files.keys import Key, keys_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Override:
    """One `--table.key value` of the command line; the value is still text."""

    key: str
    text: str


def load_config(
    path: Path | None,
    *,
    grid: str | None = None,
    overrides: tuple[Override, ...] = (),
    option: str = "--config",
) -> Config:
    """Returns the defaults, updated from the file, then `grid` (all five axes), then the overrides.

    option: the command-line option that named the file.

    Raises: UserError with all problems.
    """
    problems: list[str] = []
    tables: Tables = {name: {} for name in _tables()}
    if path is not None:
        _merge(tables, _read(path, option), f"in {path}", problems)
    if grid is not None:
        tables["grid"] = _parse_grid(grid, problems)
    for override in overrides:
        _apply(tables, override, problems)
    if problems:
        raise UserError(*problems)
    return _build(tables)


def to_toml(config: Config) -> str:
    """Returns the configuration as TOML, with the meaning of every key as a comment."""
    lines: list[str] = []
    for name, table in _tables().items():
        lines += ["", f"[{name}]"]
        for key, about in keys_of(table).items():
            assignment = f"{key} = {toml_value(getattr(getattr(config, name), key))}"
            lines.append(f"{assignment:<34}  # {about.doc}")
    return "\n".join(lines[1:]) + "\n"


def _read(path: Path, option: str) -> Mapping[str, Any]:
    try:
        return read_toml(path)
    except FileError as error:
        raise UserError(f"{option}: {error}") from None


def _merge(tables: Tables, document: Mapping[str, Any], source: str, problems: list[str]) -> None:
    for table, values in document.items():
        if table not in tables:
            names = ", ".join(f"[{name}]" for name in tables)
            problems.append(
                f"unknown table [{table}] {source}{hint(table, tables)}; tables are {names}"
            )
        elif not isinstance(values, dict):
            got = _shown(values)
            problems.append(f"{table}: expected a table [{table}] {source}, got {got}")
        else:
            for name, value in values.items():
                _set(tables, f"{table}.{name}", value, source, problems)


def _apply(tables: Tables, override: Override, problems: list[str]) -> None:
    key = _find(override.key)
    value = override.text if key is None else key.parse(override.text)
    _set(tables, override.key, value, "on the command line", problems)


def _set(tables: Tables, dotted: str, value: Any, source: str, problems: list[str]) -> None:
    """Stores a legal value in its table; otherwise adds a message to the problems."""
    key = _find(dotted)
    if key is None:
        problems.append(_unknown(dotted, source))
        return
    table, _, name = dotted.partition(".")
    if key.row is None:
        _read_into(tables[table], name, key, value, f"{dotted}:", source, problems)
    else:
        tables[table][name] = tuple(_rows(key, dotted, value, source, problems))


def _read_into(
    values: dict[str, Any], name: str, key: Key, value: Any, place: str, source: str,
    problems: list[str],
) -> None:  # fmt: skip
    try:
        values[name] = key.read(value)
    except ValueError as error:
        problems.append(f"{place} expected {error}, got {_shown(value)} {source}")


def _rows(key: Key, dotted: str, value: Any, source: str, problems: list[str]) -> Iterator[Any]:
    """Yields the legal elements of an array of tables."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        got = _shown(value)
        problems.append(f"{dotted}: expected an array of tables [[{dotted}]], got {got} {source}")
        return
    known = keys_of(key.row)
    for number, row in enumerate(value):
        values: dict[str, Any] = {}
        place, num_before = f"{dotted}[{number}]", len(problems)
        for name, given in row.items():
            if name in known:
                _read_into(values, name, known[name], given, f"{place}.{name}:", source, problems)
            else:
                keys = f"keys of [[{dotted}]]: {', '.join(known)}"
                problems.append(f"unknown key {place}.{name} {source}{hint(name, known)}; {keys}")
        if len(problems) > num_before:
            continue
        try:
            yield key.row(**values)
        except ValueError as error:
            problems.append(f"{place}.{error} {source}")


def _parse_grid(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        return dict(GridShape.parse(text).as_dict())
    except ValueError as error:
        problems.append(f"--grid {text}: {error}")
        return {}


def _build(tables: Tables) -> Config:
    """Returns the configuration. Raises UserError for values that exclude each other."""
    built, problems = {}, []
    for name, table in _tables().items():
        try:
            built[name] = table(**tables[name])
        except ValueError as error:
            problems.append(f"{name}.{error}")
    if problems:
        raise UserError(*problems)
    return Config(**built)


def _tables() -> dict[str, Any]:
    """Returns the dataclass of each table."""
    return {table.name: table.default_factory for table in fields(Config)}


def all_keys() -> list[str]:
    """Returns TABLE.KEY for each key of a configuration."""
    return [f"{name}.{key}" for name, table in _tables().items() for key in keys_of(table)]


def _find(dotted: str) -> Key | None:
    table, _, name = dotted.partition(".")
    return keys_of(_tables()[table]).get(name) if table in _tables() else None


def _unknown(dotted: str, source: str) -> str:
    """Returns the message for an unknown key, with the most similar known one."""
    every = [key.partition(".") for key in all_keys()]
    table, _, name = dotted.partition(".")
    same = ["".join(key) for key in every if key[2] == name]
    names = [key[2] for key in every if key[0] == table]
    known = f"; keys of [{table}]: {', '.join(names)}" if names else ""
    return f"unknown key {dotted} {source}{hint(dotted, same or map(''.join, every))}{known}"


def _shown(value: Any) -> str:
    """Returns the value as it is written in TOML."""
    try:
        return clipped(toml_value(value))
    except (ValueError, RecursionError):  # such as a number with thousands of digits
        kind = type(value).__name__
        return (
            f"a number of {value.bit_length()} bits" if kind == "int" else f"a value of type {kind}"
        )


def toml_value(value: Any) -> str:
    """Returns a key's value in TOML; None becomes 0."""
    if value is None:
        return "0"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
