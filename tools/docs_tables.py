"""Writes the parts of docs/ that come from the code, between marks such as <!-- tiles: begin -->.

    python tools/docs_tables.py

docs/api.md has the first paragraph of each public docstring. Most tables take their text from
docstrings, too, in which a description follows each name.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType

from axonn_ext import ops
from axonn_ext.bench.results import Comparison, Row
from axonn_ext.ops.specs import SPECS
from axonn_ext.overlap import Overlap
from axonn_ext.planner.machines.machine import load_machine, machine_names
from axonn_ext.spec import settings
from axonn_ext.spec.files.keys import keys_of
from axonn_ext.train.differences import MAY_DIFFER
from axonn_ext.train.metrics import EvaluationMetrics, StepMetrics

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# The sections of docs/api.md. A name of several modules is in the first.
MODULES = (
    "axonn_ext",
    "axonn_ext.ops",
    "axonn_ext.nn",
    "axonn_ext.models",
    "axonn_ext.models.pretrained",
    "axonn_ext.models.generation",
    "axonn_ext.models.parallelize",
    "axonn_ext.pipeline",
    "axonn_ext.overlap",
    "axonn_ext.optim",
    "axonn_ext.checkpoint",
    "axonn_ext.data",
    "axonn_ext.tracing",
    "axonn_ext.tuning",
    "axonn_ext.planner",
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def described(docstring: str | None, names: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Returns a docstring's descriptions of the names: the text after each, with indented lines.

    A line may begin with several names, separated by commas. Raises ValueError for a name without
    a description.
    """
    found: dict[tuple[str, ...], str] = {}
    begun: tuple[str, ...] = ()
    for line in inspect.cleandoc(docstring or "").splitlines():
        first = re.match(r"(\w+(?:, \w+)*)(?:  +|$)", line)
        if first is not None and set(first[1].split(", ")) <= set(names):
            begun = tuple(first[1].split(", "))
            found[begun] = line[first.end() :]
        elif begun and line.startswith(" "):
            found[begun] = f"{found[begun]} {line.strip()}".strip()
        else:
            begun = ()
    if missing := set(names) - {name for group in found for name in group}:
        raise ValueError(f"the docstring does not describe {', '.join(sorted(missing))}")
    return found


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def names_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def fields(kind: type, head: str = "key") -> str:
    """Returns a table of a dataclass that is written as JSON, so None becomes null."""
    meant = described(kind.__doc__, names_of(kind))
    rows = [(code(names), text.replace("None", "null")) for names, text in meant.items()]
    return table((head, "meaning"), rows)


def options() -> str:
    rows = [
        (f"`{name}`", str(getattr(Overlap(), name)), each.doc)
        for name, each in keys_of(Overlap).items()
    ]
    return table(("option", "default", "meaning"), rows)


def variables() -> str:
    names = re.findall(r"^AXONN_\w+(?=  )", settings.__doc__ or "", re.MULTILINE)
    meant = described(settings.__doc__, names)
    return table(("variable", "meaning"), [(code(names), text) for names, text in meant.items()])


def ops_without_function() -> str:
    """Returns a table of the ops that communicate and have no function in axonn_ext.ops."""
    specs = [s for s in SPECS.values() if s.traffic and s.name not in ops.__all__]
    rows = [(f"`{spec.name}`", spec.traffic, spec.backward) for spec in specs]
    return table(("op", "collectives", "backward"), rows)


def signature(name: str, thing: object, *, bound: bool = False) -> str:
    """Returns a name with its parameters, without annotations; objects as defaults become "...".

    bound: leaves out the first parameter. Values, errors and protocols have no parameters.
    """
    is_error = isinstance(thing, type) and issubclass(thing, Exception)
    if not callable(thing) or is_error or getattr(thing, "_is_protocol", False):
        return name
    parameters = [*inspect.signature(thing).parameters.values()][bound:]
    text = str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))
    for each in parameters:
        if each.default is not each.empty and re.search("[<=]", repr(each.default)):
            text = text.replace(f"{each.name}={each.default!r}", f"{each.name}=...")
    return f"{name}{text}"


def first_paragraph(docstring: str | None) -> str:
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def entries(name: str, thing: object) -> Iterator[str]:
    """Yields the item of a public name, and those of the documented members of a class."""
    told = first_paragraph(thing.__doc__) if callable(thing) else f"`{thing!r}`"
    yield f"* `{signature(name, thing)}`: {told}"
    members = vars(thing).items() if isinstance(thing, type) else ()
    for member, each in members:
        is_method = isinstance(each, (FunctionType, classmethod, staticmethod))
        if (is_method or isinstance(each, property)) and each.__doc__ and member[0] != "_":
            called = getattr(thing, member) if is_method else None
            shown = signature(member, called, bound=isinstance(each, FunctionType))
            yield f"  * `{shown}`: {first_paragraph(each.__doc__)}"


def api() -> str:
    lines: list[str] = []
    listed: set[int] = set()
    for title in MODULES:
        module = pkgutil.resolve_name(title)
        lines += ["", f"## `{title}`", "", first_paragraph(module.__doc__), ""]
        for name in module.__all__:
            thing = getattr(module, name)
            if not (name[0] == "_" or isinstance(thing, ModuleType) or id(thing) in listed):
                listed.add(id(thing))
                lines += entries(name, thing)
    return "\n".join(lines[1:])


def keys_that_may_differ() -> str:
    return table(("key", "why"), [(f"`{key}`", why) for key, why in MAY_DIFFER.items()])


def machines() -> str:
    rows = ((f"`{name}`", load_machine(name).description) for name in machine_names())
    return table(("name", "machine"), rows)


def hopper_tiles() -> str:
    """Raises ValueError for a tile without a comment on its line."""
    listed = (ROOT / "csrc/core/gemm/sm90_tiles.h").read_text().partition("kSm90Tiles[] = {")[2]
    listed = listed.partition("\n};")[0]
    tile = r"\{(\d+), (\d+), (\d+), (\d+), (\d+), Schedule::k(\w+)\},"
    lines = re.findall(rf"{tile} *// (.+)$", listed, re.MULTILINE)
    if len(lines) != listed.count("Schedule::"):
        raise ValueError("sm90_tiles.h: expected a comment behind each tile, on its line")
    rows = (
        (f"{m} x {n}", stages, f"{along_m} x {along_n}", schedule.lower(), use)
        for m, n, stages, along_m, along_n, schedule, use in lines
    )
    return table(("tile", "stages", "CTAs of a cluster, m x n", "schedule", "for"), rows)


# The tables of each page, keyed by the name in their marks.
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "api.md": {"api": api, "ops": ops_without_function},
        "interfaces.md": {
            "overlap": options,
            "step metrics": lambda: fields(StepMetrics),
            "evaluation metrics": lambda: fields(EvaluationMetrics),
            "variables": variables,
        },
        "benchmarks.md": {
            "columns": lambda: fields(Row),
            "summary": lambda: fields(Comparison),
        },
        "kernels.md": {"tiles": hopper_tiles},
        "planner.md": {"machines": machines},
        "training.md": {"keys that may differ": keys_that_may_differ},
    }
)


def with_tables(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with its tables between their marks. Raises ValueError without the marks."""
    for name, make in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page must have one {begin.strip()} and one {end} after it")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    for name, tables in PAGES.items():
        page = DOCS / name
        page.write_text(with_tables(page.read_text(), tables))


if __name__ == "__main__":
    main()
