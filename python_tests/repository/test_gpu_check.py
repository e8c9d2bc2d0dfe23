"""The decisions of `make gpu-check` without a GPU: settings, stages, and reasons not to run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axonn_ext.kernels import extension
from loading import ROOT, load, load_all

SCRIPT = ROOT / "tools" / "gpu_check.py"

modules = load_all("tools/gpu_check.py")
gpu_check, gpu_runs = modules["gpu_check"], modules["gpu_runs"]
gpu_schedule, gpu_stages = modules["gpu_schedule"], modules["gpu_stages"]
gpu_probe = load("tools/gpu_probe.py")
Request = gpu_check.Request
MACHINE = {"problem": "", "gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "architectures": ["9.0"],
           "torch": "2.14.1", "extension": ""}  # fmt: skip
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def stages_of(folder: Path, *, ranks: int = 1) -> dict[str, object]:
    makes = gpu_stages.StageMaker(folder / "results", folder / "scratch", ("9.0",), ranks)
    return {stage.name: stage for row in makes.table() for stage in row}


def run(**settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True,
        env=gpu_runs.environment() | settings,
    )  # fmt: skip


@no_gpu
@pytest.mark.long
def test_without_a_gpu_nothing_is_run(tmp_path: Path):
    done = run(RESULTS=str(tmp_path / "results"))
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr and "nothing was run" in done.stderr
    assert list(tmp_path.iterdir()) == []


@no_gpu
@pytest.mark.long
def test_without_a_gpu_a_stage_can_be_rehearsed(tmp_path: Path):
    done = run(ANYWAY="1", STAGE="doctor,loss", RESULTS=str(tmp_path))
    assert done.returncode == 1
    table = done.stdout.partition("\nstage ")[2]
    assert re.search(r"^doctor +ok", table, re.MULTILINE)
    found = r"^loss +failed .* ended with status 2: .*torch sees no GPU"
    assert re.search(found, table, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json", "machine.log", "doctor.log", "doctor.json", "loss.log"
    }  # fmt: skip


def test_settings():
    assert Request.of({}) == Request.of({"STAGE": "all"}) == Request(frozenset())
    request = Request.of({"STAGE": "bench,test-ranks", "BUDGET": "190.5", "ANYWAY": "1"})
    assert (request.budget, request.anyway) == (190.5, True)
    assert request.stages == {"bench", "test-ranks"}
    assert not Request.of({"ANYWAY": "0"}).anyway
    with pytest.raises(ValueError, match=r"STAGE must be all or some of build, .*got 'tests'"):
        Request.of({"STAGE": "bench,tests"})
    for text in ("9min", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"BUDGET must be a number .*got '{text}'"):
            Request.of({"BUDGET": text})
    done = run(STAGE="tests")
    assert done.returncode == 2 and "'tests'" in done.stderr


def test_stages_are_asked_for_by_their_names_and_kinds(tmp_path: Path):
    stages = stages_of(tmp_path)
    kinds = {stage.kind for stage in stages.values()}
    assert kinds & set(stages) == {"build"}, "a name means one thing"
    request = Request.of({"STAGE": "sanitize,gemm"})
    asked = [name for name, stage in stages.items() if request.asks_for(stage)]
    assert asked == ["memcheck", "racecheck", "gemm"]
    assert all(Request(frozenset()).asks_for(stage) for stage in stages.values())
    makes = gpu_stages.StageMaker(tmp_path, tmp_path)
    assert len(stages) == sum(len(row) for row in makes.table()), "names are not used twice"


def test_ranks_that_share_a_gpu_have_it_for_themselves(tmp_path: Path):
    for row in gpu_stages.StageMaker(tmp_path, tmp_path).table():
        if len(row) > 1:
            lanes = [stage.command[3] for stage in row if "gpu_tests.py" in str(stage.command)]
            assert set(lanes) == {"one"}
            assert all(stage.kind != "train" for stage in row)


# --- What is not run ------------------------------------------------------------------------------


def reasons(tmp_path: Path, *, stage: str = "", **machine: object) -> dict[str, str]:
    """Why stages do not run on such a machine, by stage."""
    request = Request.of({"STAGE": stage})
    found = {
        name: gpu_check.why_not(each, MACHINE | machine, request)
        for name, each in stages_of(tmp_path).items()
        if request.asks_for(each)
    }
    return {name: reason for name, reason in found.items() if reason}


def test_what_the_machine_lacks(tmp_path: Path, monkeypatch):
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert str(sanitizer) in stages_of(tmp_path)["memcheck"].command
    two = {"ops-published": "it needs two GPUs"}
    two["ops-torch"] = two["ops-published"]
    built = {"build": "there is no need: the compiled modules load"}
    assert reasons(tmp_path) == built | two
    assert reasons(tmp_path, gpus=2) == built
    gemms = dict.fromkeys(("gemm-tiles", "gemm"), "it needs a GPU of sm_90")
    assert reasons(tmp_path, architectures=["8.0"]) == built | two | gemms
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    assert "compute-sanitizer was not found" in reasons(tmp_path)["memcheck"]
    assert gpu_check.why_lacking("no_such_package", MACHINE) == "no_such_package is not installed"


def test_modules_that_load_are_not_built_unless_asked_for(tmp_path: Path):
    assert reasons(tmp_path, stage="build") == {}
    missing = reasons(tmp_path, extension="_cuda_sm90 is not built: no CUTLASS")
    assert "build" not in missing and len(missing) == len(stages_of(tmp_path)) - 1
    assert missing["doctor"] == (
        "the compiled modules cannot be used: _cuda_sm90 is not built: no CUTLASS"
    )


def test_the_build_is_demanded_for_these_gpus(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    command = gpu_stages.StageMaker(tmp_path, tmp_path, ("8.0", "9.0")).build().command
    assert command[:3] == ("env", "AXONN_CUDA=1", "TORCH_CUDA_ARCH_LIST=8.0;9.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    command = gpu_stages.StageMaker(tmp_path, tmp_path, ("8.0", "9.0")).build().command
    assert "TORCH_CUDA_ARCH_LIST=9.0a" in command


@pytest.mark.parametrize(
    ("architectures", "cuda", "sm90", "gpus", "why"),
    [
        ("sm_90", True, True, ["9.0"], ""),
        ("sm_80,sm_90,compute_90", True, True, ["8.0", "9.0"], ""),
        ("sm_80", True, False, ["8.0"], ""),
        ("sm_90", True, False, ["9.0"],
         "axonn_ext._cuda_sm90 is not built: CUTLASS was not found"),
        ("", False, False, ["8.0"], "axonn_ext._cuda is not built: its file is missing"),
        ("sm_80", True, True, ["9.0"],
         "axonn_ext._cuda is built for sm_80, and these GPUs are sm_90"),
    ],
)  # fmt: skip
def test_modules_are_used_if_they_are_built_for_these_gpus(
    monkeypatch, architectures, cuda, sm90, gpus, why
):
    module = SimpleNamespace(build_info=lambda: {"architectures": architectures})
    monkeypatch.setattr(extension, "cuda", module if cuda else None)
    monkeypatch.setattr(extension, "cuda_sm90", module if sm90 else None)
    monkeypatch.setattr(extension, "left_out", lambda: {"_cuda_sm90": "CUTLASS was not found"})
    assert gpu_probe.why_no_extension(gpus) == why


def test_a_probe_that_hangs_or_crashes_is_a_reason(tmp_path: Path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr(gpu_check, "TOOLS", tools)
    program = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({})); {}"
    asked = {"problem": "torch did not answer"}
    for ending, seconds, told in (
        ("__import__('time').sleep(1000)", 4.0, "it had not ended after 4 s"),
        ("__import__('ctypes').string_at(0)", 600.0, "it was killed by SIGSEGV"),
    ):
        (tools / "gpu_probe.py").write_text(program.format(asked, ending))
        machine = gpu_check.look(tmp_path / "probe.log", seconds)
        assert f"torch could not be asked for GPUs: {told}" in machine["problem"]
    (tools / "gpu_probe.py").write_text(program.format(MACHINE, "sys.exit(0)"))
    assert gpu_check.look(tmp_path / "probe.log", 600.0) == MACHINE


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["", "axonn_ext._cuda is not built: no nvcc"])
def test_a_build_is_looked_at_before_the_next_stage(tmp_path: Path, monkeypatch, left_out: str):
    """The machine appears to have a GPU."""
    looks = iter([MACHINE | {"extension": "nothing is built"}, MACHINE | {"extension": left_out}])

    def look(log: Path, seconds: float) -> dict[str, object]:
        log.touch()
        return next(looks)

    def build(self) -> object:
        command = ("echo", "compiled")
        return gpu_stages.Stage("build", "build", 300, command, self.results / "build.json", ())

    monkeypatch.setattr(gpu_check, "look", look)
    monkeypatch.setattr(gpu_stages.StageMaker, "build", build)
    (tmp_path / "scratch").mkdir()
    request = Request.of({"STAGE": "build,doctor", "RESULTS": str(tmp_path / "results")})
    status = gpu_check.check_machine(request, time.monotonic(), tmp_path / "scratch")
    assert status == 0
    content = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert content["machine"]["extension"] == left_out
    stages = content["stages"]
    assert (stages["build"]["status"], stages["build"]["found"]) == ("ok", "compiled")
    if left_out:
        assert stages["doctor"]["status"] == "not run"
        assert stages["doctor"]["found"].endswith(left_out)
    else:
        assert stages["doctor"]["status"] == "ok"


# --- The budget -----------------------------------------------------------------------------------


def test_few_stages_share_the_budget_and_many_have_more(tmp_path: Path):
    stages = stages_of(tmp_path)
    assert gpu_check.share_of(540.0, list(stages.values())) == 1.0
    assert gpu_check.share_of(270.0, list(stages.values())) == 0.5
    few = [stages["gemm"], stages["link"]]
    assert gpu_check.share_of(170.0, few) == pytest.approx(170 / (30 + 25))


def test_what_an_earlier_run_left_is_removed(tmp_path: Path):
    check = gpu_schedule.Check(tmp_path, tmp_path)
    stages = stages_of(tmp_path)
    (tmp_path / "results").mkdir()
    rows = stages["test-ranks"].rows
    for path in (rows, tmp_path / "test-ranks.log", tmp_path / "gemm.log"):
        path.touch()
    gpu_check.clear([stages["test-ranks"]], check)
    assert not rows.exists() and [path.name for path in tmp_path.glob("*.log")] == ["gemm.log"]


# --- Commands -------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("name", [
    name for name, stage in stages_of(Path("/nowhere")).items()
    if "axonn_ext" in stage.command and name != "doctor"
])  # fmt: skip
def test_the_commands_of_the_stages_are_understood(tmp_path: Path, capsys, name: str):
    """Without a GPU, each command gets as far as asking for one."""
    from axonn_ext.cli import main

    (tmp_path / "results").mkdir()
    command = stages_of(tmp_path, ranks=2)[name].command
    assert main(list(command[command.index("axonn_ext") + 1 :])) == 2
    told = capsys.readouterr().err
    assert "sees no GPU" in told or "needs an NVIDIA GPU" in told, told


@no_gpu
def test_the_page_names_commands_that_exist(tmp_path: Path, capsys):
    """Without a GPU, each command gets as far as asking for one."""
    from axonn_ext.cli import main

    page = (ROOT / "docs" / "gpu_check.md").read_text(encoding="utf-8")
    table = page.partition("## Promises")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [a-z] \| .* \| (.*) \|$", table, re.MULTILINE)
    commands = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert commands
    for text in commands:
        if text.startswith("make gpu-check STAGE="):
            assert Request.of({"STAGE": text.partition("=")[2]}).stages
            continue
        program, *arguments = text.replace("FILE", str(tmp_path / "a.png")).split()
        assert program == "axonn-ext"
        assert main([argument.replace("W", "8") for argument in arguments]) == 2
        assert "torch sees no GPU" in capsys.readouterr().err


def test_the_page_lists_the_stages_with_their_shares(tmp_path: Path):
    page = (ROOT / "docs" / "gpu_check.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (`[a-z].*?`) \| (\w+) \| (\d+) \|", page, re.MULTILINE)
    found = [
        (name, kind, int(seconds))
        for names, kind, seconds in listed for name in re.findall(r"`(.*?)`", names)
    ]  # fmt: skip
    stages = stages_of(tmp_path)
    assert found == [(name, s.kind, s.seconds) for name, s in stages.items()]
