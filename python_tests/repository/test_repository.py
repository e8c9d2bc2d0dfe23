"""Rules that hold for the repository as a whole: layers, settings, includes, characters."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "axonn_ext"

# The parts of the package, from low to high, from the page's table. A module may import its own
# part and parts of lower layers, but not other parts of its layer.
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTION = PAGE.partition("\n## The layers of the package\n")[2].partition("\n## ")[0]
LAYERS = [
    re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE)
]
LEVELS = {part: level for level, layer in enumerate(LAYERS) for part in layer}
PLANNER_IMPORTS = (["planner"], ["spec"])
PLANNER_USERS = ("calibrate", "bench/ranking", "cli/machine", "cli/plan", "train/auto_grid")
EXEMPT = {"__main__"}  # may import everything

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
CSRC = ROOT / "csrc"
CPP_FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})

# The same for C++. A part is a folder of csrc/core or csrc/ops, or a header in csrc/ops itself,
# together with its source file.
CPP_LAYERS = (
    ("core/numeric",),
    ("core/schedule", "core/ranks"),
    ("core/gemm", "core/symmetric"),
    ("core/tuning", "core/overlap", "core/emulation"),
    ("core/cuda",),
    ("ops/algorithm", "ops/checks", "ops/fill_random", "ops/left_out", "ops/needs_grad"),
    ("ops/schema", "ops/autocast", "ops/cross_entropy", "ops/reduce_slots"),
    ("ops/group", "ops/overlap"),
    ("ops/emulation", "ops/tuning", "ops/linear_axes"),
    ("ops/fused_cpu",),  # defined by ops/cpu and called by ops/composed
    ("ops/composed", "ops/cpu", "ops/cuda", "ops/cuda_sm90", "ops/autograd"),
    ("ops/bindings",),
)
CPP_LEVELS = {part: level for level, layer in enumerate(CPP_LAYERS) for part in layer}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- Layers --------------------------------------------------------------------------------------


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: `nn` for axonn_ext/nn/linear.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_part(name: str) -> bool:
    """Whether axonn_ext.<name> is a module, not a name that axonn_ext/__init__.py defines."""
    return (PACKAGE / name).is_dir() or any(PACKAGE.glob(f"{name}.py*"))


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The line and absolute dotted name of each import; `from a import b` counts as a.b.

    package  the components of the file's package, from which relative imports start
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])


def layer_errors(where: str, source: str) -> list[str]:
    """The imports of a file that its layer does not allow, as `line: reason`.

    where  the file's path in the package, without suffix
    """
    part, package = where.partition("/")[0], ("axonn_ext", *where.split("/")[:-1])
    errors = []
    for line, module in imported_modules(source, package):
        names = module.split(".")
        ours = names[0] == "axonn_ext" and names[1:2] not in PLANNER_IMPORTS
        if part == "planner" and (ours or names[0] == "torch"):
            errors.append(
                f"{line}: of ours the planner imports only spec, and no torch, not {module}"
            )
        if names[0] != "axonn_ext" or part == "planner":
            continue
        target = names[1] if len(names) > 1 and is_part(names[1]) else "__init__"
        if target == part:
            continue
        if target == "planner":
            if part != "__init__" and not where.startswith(PLANNER_USERS):
                errors.append(f"{line}: only {', '.join(PLANNER_USERS)} may call the planner")
        elif target not in LEVELS:
            errors.append(f"{line}: {target} has no layer yet: place it in docs/architecture.md")
        elif LEVELS[target] >= LEVELS[part]:
            errors.append(f"{line}: {part} may not import {target}, which is not below it")
    return errors


def test_the_table_has_parts_that_exist() -> None:
    assert LEVELS and all(is_part(part) for part in LEVELS)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    part = part_of(path)
    if part in EXEMPT:
        return
    assert part in LEVELS or part == "planner", (
        f"{name_of(path)} belongs to a part named {part}, which has no layer yet: place it in the "
        "table of docs/architecture.md"
    )
    where = path.relative_to(PACKAGE).with_suffix("").as_posix()
    assert layer_errors(where, path.read_text()) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("__init__", "from axonn_ext import train"),
        ("ops/file", "from .. import ranks"),
        ("ops/file", "def f():\n    import axonn_ext.train.loop"),
        ("data/file", "from axonn_ext.optim import adamw"),
        ("nn/file", "from axonn_ext import Grid"),
        ("nn/file", "import axonn_ext"),
        ("nn/file", "from axonn_ext import planner"),
        ("cli/train", "from axonn_ext.planner import plan"),
        ("planner/file", "from axonn_ext import ranks"),
        ("planner/file", "import torch.nn"),
    ],
)
def test_the_layer_check_finds_what_goes_up(where: str, source: str) -> None:
    assert len(layer_errors(where, source)) == 1


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports inside functions count, but not those only for type checkers."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PYTHON_FILES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {}
    for name, path in files.items():
        block = r"^if TYPE_CHECKING:\n(?:    .*\n|\n)*"
        source = re.sub(block, "if TYPE_CHECKING:\n    pass\n", path.read_text(), flags=re.M)
        package = tuple(name.split(".") if path.name == "__init__.py" else name.split(".")[:-1])
        modules = [module for _, module in imported_modules(source, package)]
        graph[name] = {
            module if module in files else module.rpartition(".")[0] for module in modules
        } & (files.keys() - {name})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


# --- Layers of the C++ code ----------------------------------------------------------------------


def cpp_part_of(path: PurePosixPath) -> str:
    """The part that a file belongs to, from its path in csrc: `ops/cpu`, `ops/checks`."""
    return "/".join(path.with_suffix("").parts[:2])


def cpp_layer_errors(part: str, source: str) -> list[str]:
    """The includes of a file that its layer does not allow, as `line: reason`."""
    errors = []
    for line, text in enumerate(source.splitlines(), start=1):
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', text)
        if match is None:
            continue
        target = cpp_part_of(PurePosixPath(match[1]))
        if target == part or target.startswith(("cutlass/", "cute/")):
            continue
        if target not in CPP_LEVELS:
            errors.append(f"{line}: {match[1]} is not in CPP_LAYERS, by its path from csrc")
        elif CPP_LEVELS[target] >= CPP_LEVELS[part]:
            errors.append(f"{line}: {part} may not include {match[1]}, which is not below it")
    return errors


@pytest.mark.parametrize("path", CPP_FILES, ids=name_of)
def test_includes_go_down_only(path: Path) -> None:
    part = cpp_part_of(PurePosixPath(path.relative_to(CSRC).as_posix()))
    assert part in CPP_LEVELS, (
        f"{name_of(path)} belongs to a part named {part}, which has no layer yet: place it in "
        f"CPP_LAYERS of {Path(__file__).name}"
    )
    assert cpp_layer_errors(part, path.read_text()) == []


@pytest.mark.parametrize(
    ("part", "include"),
    [
        ("core/ranks", "core/schedule/partition.h"),
        ("core/cuda", "ops/checks.h"),
        ("ops/composed", "ops/cpu/fused.h"),
        ("ops/composed", "../cpu/fused.h"),
    ],
)
def test_the_cpp_layer_check_finds_what_goes_up(part: str, include: str) -> None:
    assert len(cpp_layer_errors(part, f'#pragma once\n\n#include "{include}"\n')) == 1


# --- The environment, globals, includes, characters ----------------------------------------------


def environment_reads(source: str) -> list[int]:
    names = {"environ", "environb", "getenv", "getenvb"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return lines


def test_only_settings_reads_the_environment() -> None:
    reader = PACKAGE / "spec" / "settings.py"
    found = [
        f"{name_of(path)}:{line}"
        for path in PYTHON_FILES
        if path != reader
        for line in environment_reads(path.read_text())
    ]
    pattern = re.compile(r"\b(secure_)?getenv\b|\benviron\b")
    found += [name_of(path) for path in CPP_FILES if pattern.search(path.read_text())]
    assert found == [], "only axonn_ext/spec/settings.py reads environment variables"
    assert environment_reads(reader.read_text()), "the check finds nothing"


def test_no_module_rebinds_its_globals() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PYTHON_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert found == [], "no mutable globals: pass the value, or keep it in an object"


def test_functions_keep_no_results() -> None:
    """Caches could keep grids and tensors alive, for example. Those of the planner and of Triton's
    kernels are exempt, since they hold only numbers.
    """
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PYTHON_FILES
        if not name_of(path).startswith(("axonn_ext/planner/", "axonn_ext/kernels/triton/"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        if any(re.search(r"\b(cache|lru_cache)\b", ast.unparse(d)) for d in node.decorator_list)
    ]
    assert found == [], "no mutable globals: a cached function is one"


def test_torch_headers_stay_in_ops() -> None:
    torch_header = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|pybind11)/', re.MULTILINE)
    convenience = re.compile(r'^\s*#\s*include\s*[<"]torch/(extension|all|torch)\.h', re.MULTILINE)
    texts = {
        path: path.read_text() for path in [*CPP_FILES, *sorted((ROOT / "cpp_tests").glob("*/*.*"))]
    }
    ops = ROOT / "csrc" / "ops"
    outside = [
        name_of(p) for p, t in texts.items() if ops not in p.parents and torch_header.search(t)
    ]
    assert outside == [], "Torch headers belong to csrc/ops"
    assert [name_of(p) for p, t in texts.items() if convenience.search(t)] == [], (
        "include the narrowest Torch header, never torch/extension.h"
    )
    assert any(torch_header.search(text) for text in texts.values()), "the check finds nothing"


def test_names_of_test_files_are_unique() -> None:
    """pytest imports each file as a module of that name."""
    names = [path.name for path in (ROOT / "python_tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names))


def test_sources_are_ascii() -> None:
    suffixes = {".py", ".h", ".cpp", ".cu", ".cuh", ".toml", ".cmake"}
    folders = ("axonn_ext", "csrc", "cpp_tests", "python_tests", "tools", "examples", "benchmarks")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    paths += [ROOT / name for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "Makefile")]
    assert [name_of(path) for path in paths if not path.read_bytes().isascii()] == []


# --- Import --------------------------------------------------------------------------------------

LAZY = ("axonn_ext", "axonn_ext.data", "axonn_ext.models", "axonn_ext.planner")
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

for optional in ("triton", "lightning", "accelerate", "lm_eval"):
    sys.modules[optional] = None  # as where they are not installed
import axonn_ext
import torch

for module in pkgutil.walk_packages(axonn_ext.__path__, "axonn_ext."):
    skip = module.name.endswith("__main__") or module.name.startswith("axonn_ext.kernels.triton")
    needs = [f"axonn_ext.train.integrations.{n}" for n in ("fabric", "accelerate", "lm_eval")]
    if not skip and module.name not in needs:
        importlib.import_module(module.name)

assert axonn_ext._library is axonn_ext.kernels.extension  # scripts import it by that name
assert not torch.distributed.is_initialized(), "a process group was created"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert torch.get_default_dtype() == torch.float32, "the default dtype was changed"
"""


def test_import_has_no_side_effects_and_needs_no_optional_package() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", LAZY)
def test_type_checkers_see_the_names_that_are_loaded_at_first_use(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    (block,) = (n.body for n in nodes if isinstance(n, ast.If) and "TYPE" in ast.unparse(n.test))
    seen = [(node, alias) for node in block for alias in node.names]
    assert all(alias.asname == alias.name for _, alias in seen), "for others it must say `as`, too"
    assert {alias.name for _, alias in seen} == {*module.__all__} - {"__version__"}
    for node, alias in seen:
        found = pkgutil.resolve_name(f"{node.module}.{alias.name}")
        assert found is getattr(module, alias.name)
