"""The table of mutants: their changes, the tests that notice them, and its summary in the docs.

tools/emulate_mutants.py runs them. The table itself is cpp_tests/gpu_machine/mutants.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "cpp_tests" / "gpu_machine" / "mutants.toml"
DOCS = ROOT / "docs" / "gpu_machine.md"
BEGIN, END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->\n"
# The kinds that the machine appends to its errors (errors.h). A wrong number is RESULT, and a
# mutant that no test notices SURVIVES.
ERRORS = ("memory", "race", "deadlock", "trap", "undefined", "misuse")
RESULT, SURVIVES = "result", "survives"


class TableError(Exception):
    """The table no longer fits the code."""


@dataclass(frozen=True)
class Part:
    """A part of the code to change, and the tests that may notice."""

    name: str
    tests: str  # a GoogleTest filter
    program: str = "gpu_machine_runtime_tests"
    source: str = ""  # for PTX: the .cu file or the PTX file; otherwise a file of csrc
    kernel: str = ""  # regular expression for the kernel's name; empty for host code
    kernels: int = 1  # the number of kernels with such a name

    @property
    def is_host(self) -> bool:
        return self.source.startswith("csrc/")


@dataclass(frozen=True)
class Change:
    """One row of the table: a change, made in one of its places at a time, or in all together."""

    part: Part
    what: str
    old: str  # a regular expression for PTX, a text for host code
    new: str
    errors: tuple[str, ...]
    places: int = 1
    together: bool = False
    survive: tuple[int, ...] = ()
    because: str = ""

    def mutants(self) -> list[Mutant]:
        places: list[int | None] = [None] if self.together else list(range(self.places))
        return [Mutant(self, place) for place in places]


@dataclass(frozen=True)
class Mutant:
    change: Change
    place: int | None  # index of the place; None: all of them

    @property
    def name(self) -> str:
        place = "" if self.place is None or self.change.places == 1 else f" [{self.place}]"
        return f"{self.change.part.name}: {self.change.what}{place}"

    @property
    def expected(self) -> tuple[str, ...]:
        survives = (self.place or 0) in self.change.survive
        return (SURVIVES,) if survives else self.change.errors


def load_table(path: Path = TABLE) -> list[Change]:
    changes = []
    for part in tomllib.loads(path.read_text())["part"]:
        rows = part.pop("change")
        of = Part(**part)
        for row in rows:
            for name in ("errors", "survive"):
                row[name] = tuple(row.get(name, ()))
            change = Change(part=of, **row)
            check(change)
            changes.append(change)
    return changes


def check(change: Change) -> None:
    """Raises TableError if a row contradicts itself."""
    name = f"{change.part.name}: {change.what}"
    count = len(change.mutants())
    if not set(change.errors) <= {*ERRORS, RESULT}:
        raise TableError(f"{name}: errors must be of {(*ERRORS, RESULT)}, got {change.errors}")
    if not set(change.survive) <= set(range(count)):
        raise TableError(f"{name}: survive must be of 0 to {count - 1}, got {change.survive}")
    if bool(change.survive) != bool(change.because):
        raise TableError(f"{name}: what survives needs `because`, and nothing else does")
    if (len(change.survive) < count) != bool(change.errors):
        raise TableError(f"{name}: errors must be there if, and only if, some do not survive")


# --- The docs -------------------------------------------------------------------------------------


def noticed(changes: list[Change]) -> str:
    total = sum(len(change.mutants()) for change in changes)
    return f"{total - sum(len(change.survive) for change in changes)} of {total}"


def part_row(changes: list[Change]) -> str:
    part = changes[0].part
    tests = part.tests.replace("*", "\\*").replace(":", ", ")
    kinds = ", ".join(sorted({error for change in changes for error in change.errors})) or "-"
    return f"| {part.name} | {noticed(changes)} | {kinds} | {tests} |\n"


def docs_of(changes: list[Change]) -> str:
    parts = [list(group) for _, group in groupby(changes, lambda change: change.part)]
    text = f"\nThe tests notice {noticed(changes)} mutants:\n\n"
    text += "| code that is changed | noticed | as | by |\n|---|---|---|---|\n"
    text += "".join(map(part_row, parts))
    return text + "\n"


def with_table(docs: str, changes: list[Change]) -> str:
    """The text of the docs with the table in its place."""
    before, rest = docs.split(BEGIN)
    return before + BEGIN + docs_of(changes) + END + rest.split(END)[1]
