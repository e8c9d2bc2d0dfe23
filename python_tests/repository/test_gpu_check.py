"""What `make gpu-check` decides without a GPU: stages, files, what counts as passed."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from limits import HANG_SECONDS
from loading import load_all

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_check.py"

modules = load_all("tools/gpu_check.py")
gpu_check, gpu_cases = modules["gpu_check"], modules["gpu_cases"]
gpu_runs, gpu_table = modules["gpu_runs"], modules["gpu_table"]
Case = gpu_cases.Case
MACHINE = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "torch": "2.14.1", "nccl": "2.30"}
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
    with pytest.raises(
        ValueError, match="build, test, sanitize, bench, published, train, all, got 'tests'"
    ):
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
    cases = [Case("linear", (1, 1, 1), 1), Case("linear", (2, 2, 2), 1)]
    seen = []

    def run_case(case):
        seen.append(len(gpu_check.read(tmp_path / "gpu.json").get("rows", [])))
        return [ROW] if case is cases[0] else None

    monkeypatch.setattr(gpu_check, "CASES", cases)
    monkeypatch.setattr(gpu_check, "run_case", run_case)
    monkeypatch.setattr(gpu_check, "LINK_SHAPES", ())
    monkeypatch.setattr(gpu_check, "why_no_fused", lambda: "they are for sm_90")
    check = check_on(tmp_path, "bench")
    check.run()
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert seen == [0, 1]
    assert check.report.failed
    assert content["stages"]["bench"]["failures"] == [case.name for case in cases]
    assert {item["what"] for item in content["not_run"]} == {"fused GEMMs"}
    lines = gpu_table.table_of(content)
    assert any(state == "WRONG" for _, state, _ in lines)


def test_what_the_time_does_not_allow_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "STAGE_SECONDS", 0)
    check = check_on(tmp_path, "bench")
    check.run()
    left_out = {item["what"] for item in check.report.not_run}
    assert {case.name for case in gpu_check.CASES} <= left_out
    assert {f"link {m},{n},{k}" for m, n, k in gpu_check.LINK_SHAPES} <= left_out
    assert check.report.rows == [] and not check.report.failed


def shapes_of(command: list[str]) -> list[dict[str, object]]:
    """Two rows of each shape that a command is asked for."""
    shapes = [dict(zip("MNK", text.split(","), strict=True)) for text in command[-1].split(";")]
    return [{"shape": shape} for shape in shapes for _ in range(2)]


@pytest.mark.parametrize(
    ("status", "failed", "left_out"),
    [(1, ["gemm 2,2,2"], []), (124, [], ["gemm 2,2,2", "gemm 3,3,3", "gemm 4,4,4"])],
)
def test_shapes_are_timed_in_one_process_as_long_as_it_lives(
    tmp_path, monkeypatch, status, failed, left_out
):
    """The first one ends behind one shape."""
    asked: list[str] = []

    def written(command, deadline):
        asked.append(command[-1])
        return (status, shapes_of(command)[:2]) if len(asked) == 1 else (0, shapes_of(command))

    monkeypatch.setattr(gpu_check, "written", written)
    check = check_on(tmp_path, "bench")
    shapes = [(size,) * 3 for size in (1, 2, 3, 4)]
    assert check._measure("gemm", shapes, time.monotonic() + 1000) == failed
    assert asked == ["1,1,1;2,2,2;3,3,3;4,4,4", "3,3,3;4,4,4"][: 2 if failed else 1]
    assert [item["what"] for item in check.report.not_run] == left_out
    assert [row["shape"]["M"] for row in check.report.gemm] == list("113344" if failed else "11")


def test_rows_are_written_after_each_shape(tmp_path):
    """A shape whose result is wrong ends the process, and keeps those before it."""
    from axonn_ext.bench.fused_gemm import GemmRow

    def measure(m: int, n: int, k: int) -> list[GemmRow]:
        return [GemmRow("gemm", {"M": m, "N": n, "K": k}, "bf16", "tn", 1, 1, 1, 1, 1, n - 8.0)]

    path = tmp_path / "rows.json"
    with pytest.raises(AssertionError, match=r"max_difference=1\.0"):
        gpu_cases.time_shapes("1,8,3;4,8,6;7,9,8", path, measure)
    assert [row["shape"]["M"] for row in json.loads(path.read_text())] == [1, 4]


def test_what_a_command_wrote_before_its_time_was_up_is_kept():
    late = ["sh", "-c", 'echo "[1]" > "$1"; exec sleep 1000']
    assert gpu_runs.written(late, time.monotonic() + 2) == (124, [1])
    assert gpu_runs.written(["sh", "-c", "exit 3"], time.monotonic() + HANG_SECONDS) == (3, [])


def tuned(speedup: float | None) -> dict[str, object]:
    return {"product_pass": "wgrad", "m": 8, "n": 8, "k": 8, "layout": "TN", "winner": "direct",
            "direct_us": speedup, "winner_us": 1.0, "speedup": speedup}  # fmt: skip


def timed(op: str, algorithm: str, median_us: float | None) -> dict[str, object]:
    return ROW | {"op": op, "algorithm": algorithm, "median_us": median_us,
                  "correct": median_us is not None}  # fmt: skip


PAIR = [timed("ag-gemm", "sequential", 20.0), timed("ag-gemm", "auto", 10.0)]


def run_published(tmp_path: Path, monkeypatch, *, gpus: int, failing: str = "", rows=PAIR):
    """The stage with commands that write `rows`, except those with `failing` among their words."""
    asked: list[list[str]] = []

    def measured(command, *, option, seconds):
        assert option == "--json" and seconds == (300 if "tune" in command else 120)
        asked.append(command)
        if failing in command:
            return None
        return {"rows": [tuned(0.99), tuned(None)] if "tune" in command else rows}

    monkeypatch.setattr(gpu_check, "measured", measured)
    monkeypatch.setattr(gpu_check, "why_no_fused", lambda: "")
    check = check_on(tmp_path, "published")
    check.report.machine["gpus"] = gpus
    check.run()
    return check, asked


def test_one_gpu_tunes_the_published_shapes(tmp_path, monkeypatch):
    check, asked = run_published(tmp_path, monkeypatch, gpus=1)
    assert [command[-1] for command in asked] == [f"published:{m}" for m in gpu_check.TUNED_ROWS]
    assert not check.report.failed and check.report.published == []
    assert [item["reason"] for item in check.report.not_run] == ["they need two GPUs"]
    lines = gpu_table.table_of(check.content)
    assert ("wgrad 8,8,8 TN", "not run", "too small to be asked about") in lines
    assert "0.990 x as fast as the library's call in the worst of 4" in str(lines)


def test_several_gpus_time_the_ops_beside_torch(tmp_path, monkeypatch):
    check, asked = run_published(tmp_path, monkeypatch, gpus=6)
    ops = [command for command in asked if "bench" in command]
    assert len(ops) == len(gpu_check.PUBLISHED_CASES) == 21
    for command in ops:
        assert "--world 4 --dtype bf16" in " ".join(command), "a power of two divides the sizes"
        assert command[-2:] == ["--baseline", "torch-symm-mem"]
        assert "sequential,chunked,fused,auto" in command
    assert not check.report.failed
    assert check.report.published == PAIR * 21
    assert "2.000 x as fast as sequential in the worst of 1" in str(
        gpu_table.table_of(check.content)
    )


def test_where_torchs_ops_fail_ours_are_timed_alone(tmp_path, monkeypatch):
    check, asked = run_published(tmp_path, monkeypatch, gpus=2, failing="torch-symm-mem")
    assert len([command for command in asked if "bench" in command]) == 42
    failures = check.report.stages["published"]["failures"]
    assert len(failures) == 21 and all("beside torch-symm-mem" in name for name in failures)
    assert check.report.published == PAIR * 21


def test_a_wrong_row_fails_and_is_shown(tmp_path, monkeypatch):
    rows = [timed("gemm-rs", "auto", None)]
    check, asked = run_published(tmp_path, monkeypatch, gpus=2, rows=rows)
    assert len([command for command in asked if "bench" in command]) == 21, "not without torch's"
    assert check.report.failed and check.report.published == rows * 21
    assert ("gemm-rs 1 bf16 x=1 auto", "WRONG", "-") in gpu_table.table_of(check.content)


def test_the_commands_of_the_stage_are_understood():
    """Their arguments, on a CPU in place of the GPUs; torch's ops are refused there, by name."""
    from axonn_ext.cli import main

    for fused, baseline in ((True, False), (False, True)):
        command = gpu_cases.published_command("gemm-rs", 64, 2, fused=fused, baseline=baseline)
        assert command[1:3] == ["-m", "axonn_ext"]
        arguments = [word.replace("cuda", "cpu") for word in command[3:]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("axonn_ext.bench.command._launch", lambda args, plan: len(plan.specs))
            assert main(arguments) == (2 if baseline else 6)
    tune = [word.replace("cuda", "cpu") for word in gpu_cases.tune_command(1024)[3:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axonn_ext.cli.tune.measure_all", lambda console, request: [])
        assert main(tune) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_page_names_commands_that_exist(tmp_path, capsys):
    """Every promise has one; without a GPU each gets as far as asking for it."""
    from axonn_ext.cli import main

    page = (ROOT / "docs" / "gpu_check.md").read_text(encoding="utf-8")
    table = page.partition("## What is promised")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ([a-g]) \| (?:.*) \| (.*) \|$", table, re.MULTILINE)
    assert [letter for letter, _ in lines] == list("abcdefg")
    commands = [text for _, cell in lines for text in re.findall(r"`([^`]+)`", cell)]
    for text in commands:
        if text.startswith("make gpu-check STAGE="):
            assert gpu_check.stages_of(text.partition("=")[2])
            continue
        program, *arguments = text.replace("FILE", str(tmp_path / "a.png")).split()
        assert program == "axonn-ext"
        assert main([argument.replace("W", "8") for argument in arguments]) == 2
        assert "torch sees no GPU" in capsys.readouterr().err


WRITES = """
import json, sys
rows = {rows}
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({{"rows": rows}}, file)
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("rows", "status", "kept"),
    [
        ([{"correct": True}], 0, True),
        ([{"correct": False}], 1, True),  # the command says so by its status
        ([{"correct": True}], 1, False),
        ([{"correct": False}], 3, False),
    ],
)
def test_what_a_command_wrote_counts_if_it_did_not_fail(rows, status, kept):
    program = WRITES.format(rows=rows, status=status)
    found = gpu_runs.measured([sys.executable, "-c", program], option="--json")
    assert found == ({"rows": rows} if kept else None)


def test_the_page_and_the_charts_lie_beside_the_file(tmp_path):
    from bench_rows import row_of

    rows = [dataclasses.asdict(row_of(op, 8, "auto", 2.0)) for op in ("ag-gemm", "gemm-rs")]
    content = gpu_check.merge({}, report(rows=rows[:1], published=rows[1:]), gpu_check.STAGES)
    gpu_check.write(tmp_path / "gpu.json", content)
    gpu_cases.main(["--plot", str(tmp_path / "gpu.json"), "--rows", "-"])
    assert {path.name for path in tmp_path.glob("*.png")} == {"gpu-ag-gemm.png", "gpu-gemm-rs.png"}
    page = gpu_table.markdown_of(
        content | {"not_run": [{"stage": "test", "what": "a|b", "reason": "two\nlines"}]}
    )
    assert page.startswith(f"# {MACHINE['gpu']}\n")
    assert "| a\\|b | not run | two lines |" in page
    assert "| ag-gemm 8,8,8 bf16 x=2 auto | right | 2 us, 2.00 x floor |" in page


def test_the_tests_of_our_kernels_run_first():
    files = gpu_check.gpu_tests()
    assert len(files) > 3
    assert files[:2] == [
        "python_tests/gpu/test_gpu_fused.py",
        "python_tests/gpu/test_gpu_products.py",
    ]
    assert "python_tests/repository/test_gpu_check.py" not in files, "it has none"


TESTS = """
import pytest

pytestmark = pytest.mark.{mark}

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
    path.write_text(TESTS.format(wrong=wrong, mark="gpu"))
    check = check_on(tmp_path, "test")
    found = {"passed": 0, "failed": 0, "failures": []}
    check._add_tests("test", found, str(path), time.monotonic() + HANG_SECONDS, prefix=prefix)
    assert (found["passed"], found["failed"]) == (passed, failed)
    assert [failure in text for text in found["failures"]] == ([True] if failure else [])
    skipped = [item["reason"] for item in check.report.not_run]
    assert skipped == (["for two GPUs"] if passed else [])


def test_tests_that_take_too_long_are_not_failed(tmp_path):
    check = check_on(tmp_path, "test")
    found = {"passed": 0, "failed": 0, "failures": []}
    sleeps = ("sh", "-c", "exec sleep 100", "-")
    check._add_tests("test", found, "test_some.py", time.monotonic(), prefix=sleeps)
    assert found == {"passed": 0, "failed": 0, "failures": []}
    assert [item["what"] for item in check.report.not_run] == [f"{' '.join(sleeps)} test_some.py"]
    assert "time was up before" in check.report.not_run[0]["reason"]


def test_every_case_fits_its_grid():
    from axonn_ext.calibrate.shapes import BlockShape, GemmShape, problems
    from axonn_ext.spec.grid import GridShape

    for case in gpu_check.CASES:
        shape = (BlockShape if case.op == "block" else GemmShape)(*case.shape)
        grid = GridShape(x=case.ranks)
        assert problems(case.op, shape, grid, role="expand", layout="sharded") == []
