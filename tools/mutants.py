"""Makes mistakes, one at a time, in a copy of the repository; checks that the daily tests notice.

    .venv/bin/python tools/mutants.py [--only TEXT] [--new] [--record]

--only selects mistakes whose file or description contains TEXT, --new those without a recorded
test. --record writes the test that notices each into the table; it then runs first the next time.

The table is python_tests/mutants.toml. The copy has the files of HEAD and this checkout's compiled
extension. For a file of csrc/core, `tests` is a pattern for ctest -R, and the core's tests are
built in the copy. For a file of csrc/ops, the extension is built in the copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "python_tests" / "mutants.toml"
CPP_BUILD = "build/cpp"
DAILY = "not long and not slow and not gpu and not triton"
LIMIT_S = 900
_FAILED, _BROKEN = 1, 3  # as pytest's exit status: a test failed, nothing could be tested


@dataclass(frozen=True)
class Mutant:
    source: str
    tests: str
    what: str
    old: str
    new: str
    because: str = ""
    noticed_by: str = ""

    @property
    def name(self) -> str:
        return f"{self.source}: {self.what}"

    @property
    def is_core(self) -> bool:
        return self.source.startswith("csrc/core/")

    @property
    def is_op(self) -> bool:
        return self.source.startswith("csrc/ops/")

    def edited(self, root: Path) -> str:
        """The file with the mistake. Raises ValueError unless `old` occurs exactly once."""
        text = (root / self.source).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected {self.old!r} once, got {text.count(self.old)}")
        return text.replace(self.old, self.new)


def load_table(path: Path = TABLE) -> list[Mutant]:
    parts = tomllib.loads(path.read_text())["part"]
    return [Mutant(p["source"], p["tests"], **row) for p in parts for row in p["change"]]


def run_core_tests(tests: str) -> tuple[int, str]:
    """Runs the core's tests; returns the exit status, as pytest's, and the test that failed."""
    build = ["cmake", "--build", CPP_BUILD]
    if subprocess.run(build, stdout=subprocess.DEVNULL).returncode:
        return _BROKEN, ""
    ctest = ["ctest", "--test-dir", CPP_BUILD, "--no-tests=error", "--stop-on-failure", "-R", tests]
    done = subprocess.run(ctest, capture_output=True, text=True)
    failed = re.search(r"Test +#\d+: (\S+) .*\*\*\*", done.stdout)
    return (_FAILED if done.returncode else 0), failed[1] if failed else ""


def run_python_tests(tests: str) -> tuple[int, str]:
    """Runs pytest in a fork, which has torch loaded; returns its status and the failed test."""
    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            import pytest

            status: int = pytest.ExitCode.INTERNAL_ERROR
            paths = [f"python_tests/{path}" for path in tests.split()]
            try:
                status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", DAILY, *paths])
            finally:
                os._exit(status)
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(LIMIT_S)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(0)
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read().decode(errors="replace"), re.M)
    return status, failed[1] if failed else ""


def build_extension() -> bool:
    """Builds the extension in the copy; returns whether that succeeded."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return not subprocess.run(build, env={**os.environ, "AXONN_CUDA": "0"}, **quiet).returncode


def run_tests(mutant: Mutant) -> tuple[int, str]:
    """Runs a mistake's tests, the recorded one first; returns the status and the failed test."""
    if mutant.is_op and not build_extension():
        return _BROKEN, ""
    if mutant.noticed_by:
        found = run_python_tests(mutant.noticed_by)
        if found[0] == _FAILED:
            return found
    return run_core_tests(mutant.tests) if mutant.is_core else run_python_tests(mutant.tests)


def check_tests(mutants: list[Mutant]) -> None:
    """Raises ValueError if the recorded tests, or those of a part without any, already fail."""
    if any(m.is_op for m in mutants) and not build_extension():
        raise ValueError("csrc/ops: expected to compile without a mistake")
    files: dict[str, set[str]] = {}
    for mutant in mutants:
        files.setdefault(mutant.noticed_by.partition("::")[0], set()).add(mutant.noticed_by)
    recorded = [" ".join(sorted(tests)) for file, tests in files.items() if file]
    for tests in (*recorded, *{m.tests: m for m in mutants if not (m.noticed_by or m.is_core)}):
        status, test = run_python_tests(tests)
        if status:
            raise ValueError(f"{test or tests}: expected that it passes without a mistake")
    for tests in {m.tests: m for m in mutants if m.is_core}:
        if run_core_tests(tests)[0]:
            raise ValueError(f"{tests}: expected that they pass without a mistake")


def name_of(test: str) -> str:
    """The test's name as in the table: without the folder and the parameters."""
    return test.removeprefix("python_tests/").partition("[")[0]


def record(mutant: Mutant, test: str) -> None:
    """Writes the test that noticed a mistake into the table."""
    lines, source, ours = [], "", False
    for line in TABLE.read_text().splitlines(keepends=True):
        key = line.partition(" = ")[0]
        if key == "source":
            source = tomllib.loads(line)["source"]
        if key == "what":
            ours = (source, tomllib.loads(line)["what"]) == (mutant.source, mutant.what)
        if ours and key == "noticed_by":
            continue
        lines.append(line)
        if ours and key == "what":
            lines.append(f'noticed_by = "{test}"\n')
    TABLE.write_text("".join(lines))


def run(mutants: list[Mutant], *, records: bool) -> int:
    """Runs all mutants, in the copy; returns how many contradict the table."""
    if any(mutant.is_core for mutant in mutants):
        # The options of `make test-cpp`, whose objects are in ccache.
        options = ["-DAXONN_WERROR=ON", "-DAXONN_SANITIZE=", "--log-level=WARNING"]
        subprocess.run(["cmake", "-S", ".", "-B", CPP_BUILD, "-G", "Ninja", *options], check=True)
    check_tests(mutants)
    # Python recognizes stale bytecode by size and second, which a mistake may leave the same.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    wrong = 0
    # Mutants of ops come last: each mistake stays in the extension until the next build.
    for mutant in sorted(mutants, key=lambda m: m.is_op):
        path, text = Path(mutant.source), Path(mutant.source).read_text()
        path.write_text(mutant.edited(Path.cwd()))
        status, test = run_tests(mutant)
        path.write_text(text)
        # Only recorded tests are known to pass without a mistake, so check this one, too.
        if status == _FAILED and mutant.noticed_by not in ("", name_of(test)):
            passes = (not mutant.is_op or build_extension()) and not run_python_tests(
                name_of(test)
            )[0]
            status = _FAILED if passes else _BROKEN
        is_wrong = status != (0 if mutant.because else _FAILED)
        wrong += is_wrong
        found = f"noticed by {test}" if status == _FAILED else f"survives (status {status})"
        print(f"{'! ' * is_wrong}{mutant.name}: {found}", flush=True)
        may_record = records and not (is_wrong or mutant.because or mutant.is_core)
        if may_record and name_of(test) != mutant.noticed_by:
            record(mutant, name_of(test))
    print(f"mutants: {len(mutants)}, of which {wrong} are not as the table says")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--new", action="store_true", help="those for which no test is recorded")
    parser.add_argument("--record", action="store_true", help="record in the table what notices")
    args = parser.parse_args()
    mutants = [m for m in load_table() if args.only in m.name]
    if args.new:
        mutants = [m for m in mutants if not (m.noticed_by or m.because or m.is_core)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", copy], cwd=ROOT, check=True)
        try:
            for built in (ROOT / "axonn_ext").glob("*.so"):
                shutil.copy2(built, copy / "axonn_ext")
            os.chdir(copy)
            sys.path[0] = os.environ["PYTHONPATH"] = os.environ["CCACHE_BASEDIR"] = str(copy)
            import torch  # noqa: F401  once, not for each mutant

            return 1 if run(mutants, records=args.record) else 0
        finally:
            os.chdir(ROOT)
            subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
