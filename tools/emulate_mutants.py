"""Breaks kernels and host code, one mutant at a time, and checks that the GPU in software notices.

    python3 tools/emulate_mutants.py BUILD                  run all mutants of the table
    python3 tools/emulate_mutants.py BUILD --only TEXT      run those whose name contains TEXT
    python3 tools/emulate_mutants.py --write-docs           update the table in docs/gpu_machine.md

BUILD is the build folder of `make emulate`. The table is cpp_tests/gpu_machine/mutants.toml, whose
header says how to add a mutant. Each mutant is a copy of a test program, or of the PTX that it
reads, with one change; the copy is then thrown away. The results of the copy's tests are compared
with the table. Errors are: a mutant that survives but should not, one that is noticed in another
way than the table says, and one whose text does not occur as often as the table says.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutant_table import (
    DOCS,
    ERRORS,
    RESULT,
    ROOT,
    SURVIVES,
    Mutant,
    Part,
    TableError,
    load_table,
    with_table,
)

LIMIT_S = 300
PTX = re.compile(rb"\.version [0-9]+\.[0-9]+\s[^\x00]*")


# --- Making a mutant ------------------------------------------------------------------------------


def modules(data: bytes, source: str) -> Iterator[re.Match[bytes]]:
    """The PTX modules in a program or PTX file that were compiled from this source."""
    for module in PTX.finditer(data):
        if source.endswith(".ptx") or f'/{source}"'.encode() in module[0]:
            yield module


def kernel_ranges(data: bytes, part: Part) -> list[tuple[int, int]]:
    """The begin and end of each of the part's kernels, whose names match its pattern."""
    found = []
    for module in modules(data, part.source):
        starts = [m.start() for m in re.finditer(rb"^[^\n/]*\.entry ", module[0], re.M)]
        for begin, end in zip(starts, [*starts[1:], len(module[0])], strict=True):
            name = re.match(rb"[^\n]*?\.entry\s+([\w$]+)", module[0][begin:end])
            if name is not None and re.search(part.kernel, name[1].decode()):
                found.append((module.start() + begin, module.start() + end))
    if len(found) != part.kernels:
        expected = f"{part.kernels} kernel(s) '{part.kernel}'"
        raise TableError(f"{part.name}: expected {expected}, got {len(found)}")
    return found


def edited_ptx(data: bytes, mutant: Mutant) -> bytes:
    """The program with the change in a kernel's text, padded with blanks to its old length."""
    change = mutant.change
    texts = [(begin, data[begin:end].decode()) for begin, end in kernel_ranges(data, change.part)]
    count = sum(len(re.findall(change.old, text, re.M)) for _, text in texts)
    if count != change.places:
        raise TableError(
            f"{mutant.name}: expected {change.places} times '{change.old}', got {count}"
        )
    numbers = itertools.count()

    def replaced(place: re.Match[str]) -> str:
        return place.expand(change.new) if mutant.place in (None, next(numbers)) else place[0]

    for begin, text in texts:
        edited = re.sub(change.old, replaced, text, flags=re.M).encode()
        if len(edited) > len(text.encode()):
            raise TableError(f"{mutant.name}: '{change.new}' is longer than what it replaces")
        end = begin + len(text.encode())
        data = data[:begin] + edited.ljust(end - begin) + data[end:]
    return data


def edited_source(mutant: Mutant) -> str:
    change = mutant.change
    text = (ROOT / change.part.source).read_text()
    if text.count(change.old) != change.places:
        raise TableError(
            f"{mutant.name}: expected {change.places} times '{change.old}' in "
            f"{change.part.source}, got {text.count(change.old)}"
        )
    pieces = text.split(change.old)
    ends = [change.new if mutant.place in (None, i) else change.old for i in range(len(pieces) - 1)]
    return "".join(piece + end for piece, end in zip(pieces, [*ends, ""], strict=True))


def compiled(mutant: Mutant, build: Path, folder: Path) -> Path:
    """Compiles the test program with the mutated source file; returns its path."""
    part = mutant.change.part
    commands = json.loads((build / "compile_commands.json").read_text())
    entry = next((c for c in commands if c["file"] == str(ROOT / part.source)), None)
    if entry is None:
        raise TableError(f"{part.name}: nothing compiles {part.source}")
    words = shlex.split(entry["command"])
    own = words[words.index("-o") + 1]
    source, made = folder / Path(part.source).name, folder / "mutant.o"
    source.write_text(edited_source(mutant))
    # No warnings: a mutant may leave variables unused.
    words = [{own: str(made), entry["file"]: str(source)}.get(w, w) for w in words] + ["-w"]
    run_or_fail(words, build, mutant)
    steps = subprocess.run(
        ["ninja", "-t", "commands", part.program], cwd=build, capture_output=True, text=True
    )
    link = [w for w in shlex.split(steps.stdout.splitlines()[-1]) if w not in (":", "&&")]
    target = link.index("-o") + 1
    link[target] = str(folder / part.program)
    # The object comes before the libraries, so it also replaces an object inside a library.
    link = [str(made) if w == own else w for w in link]
    if str(made) not in link:
        link.insert(target - 1, str(made))
    run_or_fail(link, build, mutant)
    return folder / part.program


def run_or_fail(command: list[str], folder: Path, mutant: Mutant) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise TableError(f"{mutant.name}: does not compile:\n{done.stderr[-2000:]}")


def made_mutant(mutant: Mutant, build: Path, folder: Path) -> Path:
    """The program that tests the mutant; it reads PTX files from its working directory."""
    part = mutant.change.part
    tests = build / "cpp_tests" / "gpu_machine"
    program = folder / part.program
    if part.is_host:
        return compiled(mutant, build, folder)
    if not part.source.endswith(".ptx"):
        program.write_bytes(edited_ptx((tests / part.program).read_bytes(), mutant))
        program.chmod(0o755)
        return program
    for file in tests.rglob("*"):
        if file.suffix in (".ptx", ".txt") and "CMakeFiles" not in file.parts:
            copy = folder / file.relative_to(tests)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
    copy = folder / part.source
    copy.unlink()
    copy.write_bytes(edited_ptx((tests / part.source).read_bytes(), mutant))
    return tests / part.program


# --- Running one ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    mutant: Mutant
    verdict: str  # one of ERRORS, RESULT or SURVIVES; otherwise, why the trial itself failed
    test: str = ""  # the test that notices
    message: str = ""

    @property
    def is_as_expected(self) -> bool:
        return self.verdict in self.mutant.expected


def read_output(mutant: Mutant, output: str, status: int) -> Finding:
    """The finding for a mutant, read from the output of its tests."""
    failed = re.search(r"^\[  FAILED  \] ([^\s,]+)", output, re.M)
    if "[  PASSED  ] 0 tests" in output and failed is None:
        return Finding(mutant, "no test ran")
    if status == 0:
        return Finding(mutant, SURVIVES)
    if failed is None:
        return Finding(mutant, f"the tests ended with status {status}", message=output[-500:])
    error = re.search(rf"^.*\[({'|'.join(ERRORS)})\]", output, re.M)
    if error is None:
        unread = re.search(r"^.*(PTX line [0-9]+[,:].*|what\(\).*)$", output, re.M)
        if unread is not None:
            return Finding(mutant, "the mutant is no PTX", failed[1], unread[0])
        shown = re.search(r"^(?:Expected|.*: Failure).*(?:\n  .*)*", output, re.M)
        return Finding(mutant, RESULT, failed[1], shown[0] if shown is not None else "")
    return Finding(mutant, error[1], failed[1], error[0].strip())


def try_mutant(mutant: Mutant, build: Path) -> Finding:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        try:
            program = made_mutant(mutant, build, folder)
        except TableError as error:
            return Finding(mutant, "the table is wrong", message=str(error))
        command = [str(program), f"--gtest_filter={mutant.change.part.tests}", "--gtest_fail_fast"]
        try:
            # A mutant may print uninitialized memory, which need not be valid UTF-8.
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace",
                timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Finding(mutant, f"the tests ran for more than {LIMIT_S} s")
        return read_output(mutant, done.stdout + done.stderr, done.returncode)


def check_unchanged(parts: set[Part], build: Path) -> None:
    """Raises TableError if a part's tests fail without a mutant, which would make them useless."""
    folder = build / "cpp_tests" / "gpu_machine"
    for part in {(part.program, part.tests): part for part in parts}.values():
        done = subprocess.run(
            [str(folder / part.program), f"--gtest_filter={part.tests}"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or "[  PASSED  ] 0 tests" in done.stdout:
            raise TableError(f"{part.name}: its tests do not pass:\n{done.stdout[-2000:]}")


def run(build: Path, only: str, jobs: int) -> int:
    mutants = [m for change in load_table() for m in change.mutants() if only in m.name]
    if not mutants:
        raise TableError(f"--only: no mutant's name contains '{only}'")
    check_unchanged({m.change.part for m in mutants}, build)
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        trial: Callable[[Mutant], Finding] = partial(try_mutant, build=build)
        for found in pool.map(trial, mutants):
            print(f"{found.mutant.name}: {found.verdict} {found.test}", flush=True)
            if not found.is_as_expected:
                wrong += 1
                expected = " or ".join(found.mutant.expected)
                print(f"  expected {expected}; {found.message}", flush=True)
    print(f"emulate-mutants: {len(mutants)} mutants, {wrong} not as the table says")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, nargs="?", help="the build folder of make emulate")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--write-docs", action="store_true", help="write the table of the docs")
    options = parser.parse_args()
    if options.write_docs:
        DOCS.write_text(with_table(DOCS.read_text(), load_table()))
        return 0
    if options.build is None or shutil.which("ninja") is None:
        parser.error("expected a build folder, and ninja")
    try:
        return run(options.build.resolve(), options.only, options.jobs)
    except TableError as error:
        print(f"emulate-mutants: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
