"""Builds and tests the package with several Pythons and torches; `make matrix` runs it.

    make matrix PYTHONS="python3.11 /opt/python/bin/python3.13" TORCHES="2.11 2.15"

The default is all supported versions. Each combination gets a copy of this checkout in
build/matrix, with a .venv as `make build` makes it, but without the CUDA parts. The copy is then
removed, so there is only one at a time. The tests are those of the ops, models, compilation and
training. A result replaces its combination's row of the table in CONTRIBUTING.md. A combination
that cannot be set up gets a row that says why, unless it already has a row. Exit status: 1 if a
test or a build failed, otherwise 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap import ROOT

COPY = ROOT / "build" / "matrix"
PYTHONS = "python3.11 python3.12 python3.13"
TORCHES = "2.11 2.12 2.13 2.14 2.15"
TESTS = tuple(
    f"python_tests/{name}.py"
    for name in ("ops/test_ops", "models/test_models", "ops/test_compile", "train/test_train")
)
NOT_RUN = "slow or gpu or triton"
TABLE = ROOT / "CONTRIBUTING.md"
HEADER = "| Python | torch | tests | day | processor |"
# The key of a row: the first two numbers of its Python and torch versions.
ROW = re.compile(r"\| (\d+\.\d+)\S* \| (\d+\.\d+)\S* \|")

VERSIONS = """
import importlib.metadata, platform
print(platform.python_version(), importlib.metadata.version("torch"))
"""


@dataclass(frozen=True)
class Row:
    """The result of one combination."""

    python: str
    torch: str
    tests: str
    ok: bool
    ran: bool = True

    def line(self) -> str:
        day = datetime.date.today().isoformat()
        return f"| {self.python} | {self.torch} | {self.tests} | {day} | {processor()} |"


def processor() -> str:
    """The model of this machine's processors."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


# --- One combination ------------------------------------------------------------------------------


def copy_checkout() -> None:
    """Copies all files of the checkout that git does not ignore, as they are now."""
    shutil.rmtree(COPY, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


def execute(command: Sequence[str | Path], **settings: str) -> tuple[int, str]:
    """Runs a command in the copy, showing its output; returns its exit status and output."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    # Replaces the checkout's own .venv, which make has put at the front.
    kept["PATH"] = os.pathsep.join([str(COPY / ".venv" / "bin"), kept.get("PATH", os.defpath)])
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=COPY,
        env=kept | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def version_of(python: str) -> str | None:
    """The version of an interpreter; None if it does not exist."""
    if shutil.which(python) is None:
        return None
    program = "import platform; print(platform.python_version())"
    return subprocess.check_output([python, "-I", "-c", program], text=True).strip()


def named_version(python: str) -> str | None:
    """The version in an interpreter's name, e.g. 3.12 for python3.12; None if it has none."""
    match = re.fullmatch(r"python(\d+\.\d+)\S*", Path(python).name)
    return match[1] if match else None


def summary(output: str) -> str:
    """The counts in pytest's last line, e.g. "2 failed, 310 passed"."""
    counts = re.findall(r"\d+ (?:failed|passed|error|errors|skipped|xfailed)\b", output[-400:])
    return ", ".join(dict.fromkeys(counts)) or "the tests did not run"


def run_combination(python: str, torch: str) -> Row:
    """Sets up, builds and tests one combination."""
    found = version_of(python)
    if found is None:
        why = f"not run: there is no {Path(python).name} here"
        return Row(named_version(python) or python, torch, why, ok=True, ran=False)
    copy_checkout()
    settings = {"TORCH": f"torch=={torch}.*", "AXONN_CUDA": "0"}
    steps = ("tools/bootstrap.py", "environment", "extension")
    start = time.monotonic()
    status, output = execute([python, *steps], **settings)
    if status != 0 and "No matching distribution found for torch==" in output:
        why = "not run: no index has this torch for it"
        return Row(found, torch, why, ok=True, ran=False)
    if status != 0:
        return Row(found, torch, "it does not build", ok=False)
    built = time.monotonic() - start
    interpreter = COPY / ".venv" / "bin" / "python"
    _, versions = execute([interpreter, "-I", "-c", VERSIONS])
    start = time.monotonic()
    status, output = execute([interpreter, "-m", "pytest", "-q", "-m", f"not ({NOT_RUN})", *TESTS])
    print(f"matrix: built in {built:.0f} s, tested in {time.monotonic() - start:.0f} s", flush=True)
    return Row(*versions.split(), tests=summary(output), ok=status == 0)


# --- The table ------------------------------------------------------------------------------------


def key_of(line: str) -> tuple[tuple[int, ...], ...]:
    match = ROW.match(line)
    assert match is not None
    return tuple(tuple(int(number) for number in group.split(".")) for group in match.groups())


def with_row(text: str, line: str, *, ran: bool = True) -> str:
    """The document with the row in its table, replacing the row of the same combination.

    A row for a combination that did not run (ran=False) replaces no other.

    Raises: ValueError if the document has no such table.
    """
    head, found, tail = text.partition(HEADER + "\n")
    if not found:
        raise ValueError(f"{TABLE.name} has no table that begins with {HEADER}")
    rule, _, rest = tail.partition("\n")
    lines = rest.split("\n")
    count = next((i for i, old in enumerate(lines) if not old.startswith("|")), len(lines))
    rows = {key_of(old): old for old in lines[:count]}
    if ran or key_of(line) not in rows:
        rows[key_of(line)] = line
    table = [rows[key] for key in sorted(rows)]
    return head + found + "\n".join([rule, *table, *lines[count:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    pythons = (os.environ.get("PYTHONS") or PYTHONS).split()
    for python in pythons:
        if version_of(python) is None and named_version(python) is None:
            parser.error(f"PYTHONS: there is no {python} here, and its name tells no version")
    failed = 0
    for torch in (os.environ.get("TORCHES") or TORCHES).split():
        for python in pythons:
            print(f"matrix: {python}, torch {torch}", flush=True)
            try:
                row = run_combination(python, torch)
            finally:
                shutil.rmtree(COPY, ignore_errors=True)
            failed += not row.ok
            TABLE.write_text(with_row(TABLE.read_text(), row.line(), ran=row.ran))
            print(f"matrix: {dataclasses.astuple(row)[:3]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
