"""What `make gpu-check` decides without a GPU: stages, files, what counts as passed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "gpu_check.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # where dataclasses look their annotations up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # as for a script
        spec.loader.exec_module(module)
    return module


gpu_check = load()
MACHINE = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.14.1"}
ROW = {"op": "linear", "shape": {"M": 1}, "dtype": "bf16", "grid": {"x": 1}, "algorithm": "auto",
       "correct": False, "median_us": None, "ratio_to_floor": None}  # fmt: skip


def report(**parts: object):
    return gpu_check.Report(dict(MACHINE), **parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr and "nothing was run" in done.stderr


def test_stages():
    assert gpu_check.stages_of("") == gpu_check.stages_of("all") == gpu_check.STAGES
    assert gpu_check.stages_of("bench") == ("bench",)
    with pytest.raises(ValueError, match="build, test, sanitize, bench, train, all, got 'tests'"):
        gpu_check.stages_of("tests")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env={"STAGE": "tests"}
    )
    assert done.returncode == 2 and "'tests'" in done.stderr


def test_a_stage_keeps_what_the_others_found():
    earlier = gpu_check.merge(
        {},
        report(
            stages={"test": {"passed": 3}, "bench": {"failed": 0}},
            rows=[{"op": "old"}],
            not_run=[
                {"stage": "test", "what": "a", "reason": "b"},
                {"stage": "bench", "what": "c", "reason": "d"},
            ],
        ),
        ("test", "bench"),
    )
    merged = gpu_check.merge(earlier, report(stages={"bench": {"failed": 1}}), ("bench",))
    assert merged["stages"] == {"test": {"passed": 3}, "bench": {"failed": 1}}
    assert merged["rows"] == []  # of this bench, which had none
    assert [item["what"] for item in merged["not_run"]] == ["a"]
    other = gpu_check.merge({**earlier, "machine": {"gpu": "another"}}, report(), ("train",))
    assert other["stages"] == {} and other["rows"] == []


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "results" / gpu_check.file_name(MACHINE["gpu"])
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    assert gpu_check.read(path) == {}
    gpu_check.write(path, {"rows": [1]})
    with pytest.raises(ValueError):
        gpu_check.write(path, {"rows": [float("nan")]})
    assert gpu_check.read(path) == {"rows": [1]}


XML = """<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="bad"><failure message="no"/></testcase>
<testcase classname="t" name="broken"><error message="no"/></testcase>
<testcase classname="t" name="skipped"><skipped message="one GPU only"/></testcase>
</testsuite></testsuites>"""


def test_skipped_tests_are_not_passed():
    counts, skipped = gpu_check.count_tests(XML)
    assert counts == {"passed": 1, "failed": 2}
    assert skipped == [("t.skipped", "one GPU only")]
    assert gpu_check.count_tests("<testsuites/>")[0]["failed"] == 1


def check_on(tmp_path: Path, *stages: str):
    return gpu_check.Check(stages, tmp_path / "gpu.json", report(), {})


def test_cases_are_written_as_they_end_and_failures_counted(tmp_path, monkeypatch):
    cases = [gpu_check.Case("linear", (1, 1, 1), 1), gpu_check.Case("linear", (2, 2, 2), 1)]
    seen = []

    def run_case(case):
        path = tmp_path / "gpu.json"
        seen.append(len(json.loads(path.read_text())["rows"]))
        return [ROW] if case is cases[0] else None

    monkeypatch.setattr(gpu_check, "CASES", cases)
    monkeypatch.setattr(gpu_check, "run_case", run_case)
    monkeypatch.setattr(gpu_check, "measured", lambda command: [])
    monkeypatch.setattr(gpu_check, "why_no_fused", lambda: "they are for sm_90")
    check = check_on(tmp_path, "bench")
    check.run()
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert seen == [0, 1]
    assert check.report.failed
    assert content["stages"]["bench"]["failures"] == [case.name for case in cases]
    assert {item["what"] for item in content["not_run"]} == {"fused GEMMs"}
    lines = gpu_check.table_of(content)
    assert any(state == "WRONG" for _, state, _ in lines)


def test_what_the_time_does_not_allow_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "STAGE_SECONDS", 0)
    monkeypatch.setattr(gpu_check, "measured", lambda command: [])
    check = check_on(tmp_path, "bench")
    check.run()
    left_out = {item["what"] for item in check.report.not_run}
    assert {case.name for case in gpu_check.CASES} <= left_out
    assert check.report.rows == []


def test_the_tests_whose_kernels_may_end_cuda_run_last():
    files = gpu_check.gpu_tests()
    assert len(files) > 3 and files[-1] == "python_tests/test_gpu_fused.py"


TESTS = """
import pytest

pytestmark = pytest.mark.gpu

def test_right(): pass
def test_wrong(): assert {wrong} == 0
@pytest.mark.skip(reason="for two GPUs")
def test_skipped(): pass
"""


@pytest.mark.parametrize(
    ("wrong", "prefix", "passed", "failed", "failure"),
    [
        (0, (), 2, 0, None),
        (1, (), 1, 1, None),
        # A tool around the tests that finds something, although they pass; and one that ends them.
        (0, ("sh", "-c", '"$@"; exit 9', "-"), 2, 1, "ended with 9"),
        (0, ("sh", "-c", "exit 3", "-"), 0, 1, "pytest ended with 3 and no report"),
    ],
)
def test_files_of_tests_are_run_alone(tmp_path, wrong, prefix, passed, failed, failure):
    path = tmp_path / "test_some.py"
    path.write_text(TESTS.format(wrong=wrong))
    check = check_on(tmp_path, "test")
    found = {"passed": 0, "failed": 0, "failures": []}
    check._add_tests("test", found, str(path), time.monotonic() + 100, prefix=prefix)
    assert (found["passed"], found["failed"]) == (passed, failed)
    assert [failure in text for text in found["failures"]] == ([True] if failure else [])
    skipped = [item["reason"] for item in check.report.not_run]
    assert skipped == (["for two GPUs"] if passed else [])


def test_every_case_fits_its_grid():
    from axonn_ext.bench.shapes import BlockShape, GemmShape, problems
    from axonn_ext.grid import GridShape

    for case in gpu_check.CASES:
        shape = (BlockShape if case.op == "block" else GemmShape)(*case.shape)
        grid = GridShape(x=case.ranks)
        assert problems(case.op, shape, grid, role="expand", layout="sharded") == []
