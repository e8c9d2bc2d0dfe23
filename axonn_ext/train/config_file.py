"""Reads a `Config` from a TOML file and dotted overrides, and writes it as TOML.

Messages about mistakes name the key, the expected and the given value, and where it came from.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from axonn_ext.inputs.errors import clipped, hint
from axonn_ext.inputs.files import FileError, read_toml
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.arguments import MOST
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import MAX_NUMBER, Config, KeyInfo, key_info

Tables = dict[str, dict[str, Any]]
_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Override:
    """One `--table.key value` of the command line, whose value is still text."""

    key: str
    text: str


def load_config(
    path: Path | None,
    *,
    grid: str | None = None,
    overrides: tuple[Override, ...] = (),
    option: str = "--config",
) -> Config:
    """Returns the defaults, changed by the file, by `grid` (all five axes) and by the overrides.

    Each of these replaces values of those before it. option: the option that named the file.

    Raises: UserError with all problems.
    """
    problems: list[str] = []
    tables: Tables = {table.name: {} for table in dataclasses.fields(Config)}
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
    for table in dataclasses.fields(Config):
        values = getattr(config, table.name)
        lines += ["", f"[{table.name}]"]
        for key in dataclasses.fields(values):
            assignment = f"{key.name} = {toml_value(getattr(values, key.name))}"
            lines.append(f"{assignment:<34}  # {key_info(key).doc}")
    return "\n".join(lines[1:]) + "\n"


def describe_keys() -> str:
    """Returns every key with its default and meaning, for --help."""
    return to_toml(Config())


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
    source = "on the command line"
    key = _find(override.key)
    if key is None:
        problems.append(_unknown(override.key, source))
        return
    text, kind = override.text, _TYPES[str(key.type)]
    value: Any = text
    if kind is bool:
        value = _BOOLEANS.get(text.lower(), text)
    elif kind is not str:
        try:
            value = int(text) if kind is int else float(text)
        except ValueError:
            value = text
    _set(tables, override.key, value, source, problems)


def _set(tables: Tables, dotted: str, value: Any, source: str, problems: list[str]) -> None:
    """Puts a value into its table if it is legal; otherwise adds to the problems what is wrong."""
    key = _find(dotted)
    if key is None:
        problems.append(_unknown(dotted, source))
        return
    kind, info = _TYPES[str(key.type)], key_info(key)
    if kind is float and type(value) is int and abs(value) < MOST:
        value = float(value)
    if type(value) is not kind or not _in_range(value, info):
        problems.append(
            f"{dotted}: expected {_expected(kind, value, info)}, got {_shown(value)} {source}"
        )
        return
    table, _, name = dotted.partition(".")
    tables[table][name] = value


def _parse_grid(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        return dict(GridShape.parse(text).as_dict())
    except ValueError as error:
        problems.append(f"--grid {text}: {error}")
        return {}


def _build(tables: Tables) -> Config:
    classes = {table.name: table.default_factory for table in dataclasses.fields(Config)}
    built: dict[str, Any] = {}
    for name, values in tables.items():
        table_class = classes[name]
        assert callable(table_class)
        built[name] = table_class(**values)
    return Config(**built)


def _fields_of(table: str) -> dict[str, Field[Any]]:
    default = getattr(Config(), table)
    return {key.name: key for key in dataclasses.fields(default)}


def _find(dotted: str) -> Field[Any] | None:
    table, _, name = dotted.partition(".")
    if table not in {t.name for t in dataclasses.fields(Config)}:
        return None
    return _fields_of(table).get(name)


def _unknown(dotted: str, source: str) -> str:
    """Returns the message for a key that does not exist, with the most similar one that does."""
    table, _, _ = dotted.partition(".")
    tables = [t.name for t in dataclasses.fields(Config)]
    every = [f"{t}.{name}" for t in tables for name in _fields_of(t)]
    known = f"; keys of [{table}]: {', '.join(_fields_of(table))}" if table in tables else ""
    return f"unknown key {dotted} {source}{hint(dotted, every)}{known}"


def _in_range(value: Any, info: KeyInfo) -> bool:
    if info.choices:
        return value in info.choices
    if isinstance(value, str) and not _is_unicode(value):
        return False
    if info.accepts is not None and not info.accepts(value):
        return False
    if isinstance(value, str):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if value > _most(value):
        return False
    return not (
        (info.minimum is not None and value < info.minimum)
        or (info.maximum is not None and value > info.maximum)
        or (info.above is not None and value <= info.above)
    )


def _most(value: float) -> float:
    return MAX_NUMBER if isinstance(value, float) else MOST


def _is_unicode(text: str) -> bool:
    """Whether TOML can hold the text: it cannot hold names of files whose bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _expected(kind: type, value: Any, info: KeyInfo) -> str:
    if info.choices:
        return f"one of {', '.join(info.choices)}"
    if info.expected:
        return info.expected
    if isinstance(value, str) and not _is_unicode(value):
        return "text in UTF-8, without zeros"
    if info.maximum is None and type(value) in (int, float) and value > _most(value):
        return f"{'a whole number' if kind is int else 'a number'} <= {_most(value)}"
    text = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    limits = [
        f"{sign} {limit:g}"
        for sign, limit in ((">=", info.minimum), (">", info.above), ("<=", info.maximum))
        if limit is not None
    ]
    return " ".join([text, " and ".join(limits)]).strip()


def _shown(value: Any) -> str:
    """Returns the value as it is written in TOML."""
    try:
        return clipped(toml_value(value))
    except ValueError:  # Python raises it for a number with thousands of digits
        return f"a number of {value.bit_length()} bits"


def toml_value(value: Any) -> str:
    """Returns a value of a key as TOML has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
