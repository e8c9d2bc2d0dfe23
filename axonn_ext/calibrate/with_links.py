"""Rewrites a machine's file with links that were measured on the machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence

from axonn_ext.calibrate.file import LinkRow, text_of_links
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.spec.files.errors import InputError

_LEVEL, _ROW = "[[levels]]", "[[levels.measured]]"


def level_of(machine: Machine, row: LinkRow, num_ranks: int) -> str:
    """Returns the name of the level of links that a row's groups use on the machine.

    num_ranks: the number of ranks in the measurement. Raises InputError if the machine has no such
    level.
    """
    name = machine.links.wire(row.inner, row.size, "x", num_ranks)
    if name not in {level.name for level in machine.links.levels}:
        raise InputError(f"machine {machine.name} has separate links for each axis (emulated)")
    return name


def with_links(text: str, rows: Sequence[tuple[str, LinkRow]], source: str) -> str:
    """Returns the text of a machine's file with measured rows in their levels.

    rows: the name of a level, and a row measured there. They replace the file's rows for the same
    groups, whatever their collective. source: where the rows are from, for the file's `source`.
    Everything else stays, including comments. Raises InputError for a file with inline levels.
    """
    lines = re.sub(
        r'(?m)^(source = ".*)"[ \t]*$', lambda m: f'{m[1]}; {source}"', text, count=1
    ).splitlines()
    starts = [i for i, line in enumerate(lines) if _code(line) == _LEVEL]
    if not starts:
        raise InputError(f"--base: expected a file with tables {_LEVEL}, got none")
    result = lines[: starts[0]]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        block = lines[start:end]
        name = _first_table(block)["name"]
        mine = [row for level, row in rows if level == name]
        result += _with_rows(block, mine) if mine else block
    return "\n".join(result) + "\n"


def levels_of(text: str) -> str:
    """Returns a machine's file from its first level to the end, with the comment above it."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if _code(line) == _LEVEL)
    while start and lines[start - 1].startswith("#"):
        start -= 1
    return "\n".join(["", *lines[start:], ""])


def _code(line: str) -> str:
    """Returns a line without its comment; no string in it may have a hash."""
    return line.partition("#")[0].strip()


def _first_table(block: Sequence[str]) -> dict[str, object]:
    """Returns the keys of the table at the head of a block, without those of nested tables."""
    inside = [i for i, line in enumerate(block) if i and line.strip().startswith("[")]
    head = block[1 : inside[0]] if inside else block[1:]
    return tomllib.loads("\n".join(head))


def _with_rows(block: list[str], rows: list[LinkRow]) -> list[str]:
    """Returns the lines of a level, with the new rows in place of the old ones."""
    last = max(i for i, line in enumerate(block) if line.strip() and not line.startswith("#"))
    own, after = block[: last + 1], block[last + 1 :]
    heads = [i for i, line in enumerate(own) if line.strip().startswith("[")]
    replaced = {(row.inner, row.size) for row in rows}
    kept: list[str] = []
    for start, end in zip(heads, [*heads[1:], len(own)], strict=True):
        table = _first_table(own[start:end]) if _code(own[start]) == _ROW else {}
        if (table.get("inner"), table.get("size")) not in replaced:
            kept += own[start:end]
    while kept and not kept[-1].strip():
        kept = kept[:-1]
    return [*kept, "", *list(text_of_links(rows))[:-1], *after]
