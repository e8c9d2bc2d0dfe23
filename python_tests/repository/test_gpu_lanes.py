"""Tests of `make gpu-check` that hang, crash or lose CUDA do not affect others; its lanes.

The tests that run here are in a temporary folder; they are marked gpu, but need no GPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from loading import ROOT, load_all

modules = load_all("tools/gpu_check.py")
gpu_found, gpu_stages = modules["gpu_found"], modules["gpu_stages"]
TOOLS = ROOT / "tools"
HANG_SECONDS = 30  # the limit for a test that never ends
LONG_SECONDS = 3600

BEGIN = """
import ctypes, os, pathlib, signal, sys, time, types
import pytest

pytestmark = pytest.mark.gpu
HERE = pathlib.Path(__file__).parent
"""


def write(folder: Path, tests: str, name: str = "test_some.py") -> Path:
    path = folder / name
    path.write_text(BEGIN + textwrap.dedent(tests))
    return path


def command(
    results: Path, *files: Path, lane: str = "one", part: str = "1/1", hang: int = LONG_SECONDS
) -> list[str]:
    words = (results, lane, part, hang, *files)
    return [sys.executable, str(TOOLS / "gpu_tests.py"), *map(str, words)]


def environment() -> dict[str, str]:
    folders = (str(TOOLS), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def run(results: Path, *files: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(results, *files, **options), env=environment(), capture_output=True, text=True
    )


def rows_of(results: Path) -> dict[str, tuple[str, str]]:
    """The outcome of each test and its reason, by name."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    tests = [row for row in rows if "outcome" in row]
    names = [(row.get("test") or row["outside"]).rpartition("::")[2] for row in tests]
    assert len(names) == len(set(names)), "a line for each test"
    return {name: (row["outcome"], row["reason"]) for name, row in zip(names, tests, strict=True)}


EVERY_END = """
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.fixture
def breaks(): raise ValueError("in a fixture")
def test_breaks(breaks): pass
@pytest.mark.skip(reason="for two GPUs")
def test_is_skipped(): pass
def test_hangs(): time.sleep(1000)
def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_crashes(): ctypes.string_at(0)
def test_exits(): os._exit(0)
def test_loses_cuda():
    def lost(): raise RuntimeError("an illegal memory access was encountered")
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lost)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
def test_has_a_process_of_its_own(): assert "torch" not in sys.modules
"""


@pytest.mark.long
def test_each_test_costs_itself_alone(tmp_path: Path):
    results = tmp_path / "rows.jsonl"
    done = run(results, write(tmp_path, EVERY_END), hang=HANG_SECONDS)
    rows = rows_of(results)
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("2 passed, 7 failed (test_some.py::test_fails, "), done.stdout
    assert last.endswith(" and 3 more), 1 skipped, 0 not reached")
    assert rows.pop("test_passes") == rows.pop("test_has_a_process_of_its_own") == ("passed", "")
    assert rows.pop("test_is_skipped") == ("skipped", "for two GPUs")
    assert {outcome for outcome, _ in rows.values()} == {"failed"}
    reasons = {name: reason for name, (_, reason) in rows.items()}
    assert "assert 1 == 2" in reasons["test_fails"]
    assert "in a fixture" in reasons["test_breaks"]
    assert reasons["test_hangs"] == f"it had not ended after {HANG_SECONDS} s"
    assert reasons["test_is_killed"] == "the process was killed by SIGKILL"
    assert reasons["test_crashes"] == "the process was killed by SIGSEGV"
    assert reasons["test_exits"] == "the process ended with status 0"
    assert reasons["test_loses_cuda"] == "CUDA was lost: an illegal memory access was encountered"
    assert "in test_hangs" in done.stderr, "where it hung"


@pytest.mark.long
def test_what_is_cut_goes_on_there(tmp_path: Path):
    """A test that is running when the time is up has not failed."""
    path = write(tmp_path, """
        def test_first(): pass
        def test_second():
            (HERE / "begun").touch()
            while not (HERE / "go").exists():
                time.sleep(0.01)
        def test_third(): pass
    """)  # fmt: skip
    results = tmp_path / "rows.jsonl"
    process = subprocess.Popen(
        command(results, path), env=environment(), stdout=subprocess.PIPE, text=True
    )
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert output.splitlines()[-1] == "1 passed, 0 failed, 0 skipped, 2 not reached"
    assert process.returncode == 0 and list(rows_of(results)) == ["test_first"]
    (tmp_path / "go").touch()
    done = run(results, path)
    assert done.returncode == 0, "the status is only of this stage"
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped, 0 not reached"
    assert list(rows_of(results)) == ["test_first", "test_second", "test_third"]
    again = run(results, path)
    assert again.stdout == "\n0 passed, 0 failed, 0 skipped, 0 not reached\n", "nothing is left"


@pytest.mark.long
def test_a_file_that_cannot_be_imported_fails_once(tmp_path: Path):
    broken = write(tmp_path, "raise RuntimeError('broken')", "test_broken.py")
    right = write(tmp_path, """
        def test_exits(): os._exit(1)
        def test_passes(): pass
    """)  # fmt: skip
    results = tmp_path / "rows.jsonl"
    assert run(results, broken, right).returncode == 1
    rows = rows_of(results)
    assert [outcome for outcome, _ in rows.values()] == ["failed", "failed", "passed"]
    assert "broken" in next(iter(rows.values()))[1]


@pytest.mark.parametrize("ending", ["a file that is missing", "a plugin that crashes"])
def test_pytest_that_does_not_get_to_a_test_is_tried_once(tmp_path: Path, ending: str):
    path = write(tmp_path, "def test_passes(): pass")
    if ending == "a file that is missing":
        path = tmp_path / "missing.py"
    else:
        (tmp_path / "conftest.py").write_text("import os\nos._exit(3)\n")
    results = tmp_path / "rows.jsonl"
    done = run(results, path)
    assert done.returncode == 1
    status = 4 if "missing" in ending else 3
    assert rows_of(results) == {"pytest": ("failed", f"the process ended with status {status}")}
    assert "no test was reached" in done.stdout


# --- Lanes ----------------------------------------------------------------------------------------

OF_LANES = """
class Shape:
    def __init__(self, size): self.size = size
@pytest.fixture
def gpu_pool(): pass
@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_sizes(gpu_pool, world_size): pass
@pytest.mark.parametrize("shape", [Shape(4), Shape(1)])
def test_shapes(gpu_pool, shape): pass
def test_two(gpu_pool): pass
@pytest.mark.parametrize("case", range(5))
def test_one(case): pass
def test_alone(): pass
@pytest.mark.long
def test_job(gpu_pool): pass
@pytest.mark.timing
def test_time(gpu_pool): pass
@pytest.mark.timing
@pytest.mark.long
def test_time_of_a_job(): pass
"""


def lane(tmp_path: Path, name: str, part: str = "1/1") -> list[str]:
    """The names of the lane's tests, in order."""
    results = tmp_path / f"{name}-{part.replace('/', 'of')}.jsonl"
    done = run(results, write(tmp_path, OF_LANES), lane=name, part=part)
    assert done.returncode == 0, done.stdout
    return list(rows_of(results))


@pytest.mark.long
def test_every_test_is_in_a_lane(tmp_path: Path):
    assert lane(tmp_path, "jobs") == ["test_job"]
    assert lane(tmp_path, "timing") == ["test_time_of_a_job", "test_time"]
    one = lane(tmp_path, "one")
    order = ("one[0]", "one[1]", "alone", "one[2]", "one[3]", "one[4]")
    assert one == [f"test_{name}" for name in order], "some cases of every function first"
    assert lane(tmp_path, "ranks") == [
        "test_shapes[shape1]", "test_sizes[2]", "test_two", "test_sizes[4]", "test_shapes[shape0]",
        "test_sizes[1]",
    ]  # fmt: skip
    parts = [lane(tmp_path, "one", f"{part}/2") for part in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(one) and len(parts[0]) == len(parts[1])


@pytest.mark.long
def test_the_sanitizer_has_tests_of_every_kernel_that_it_names(tmp_path: Path):
    """The tests are selected by name, and skipped without a GPU."""
    words = gpu_stages.StageMaker(tmp_path, tmp_path).sanitize("memcheck").command
    pytest_command = list(words[words.index(sys.executable) :])
    done = subprocess.run(
        [*pytest_command, "--collect-only"], cwd=ROOT, env=environment(), text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    named = set(re.findall(r"test_\w+", gpu_stages.SANITIZED))
    assert named and set(re.findall(r"::(test_\w+)", done.stdout)) == named
