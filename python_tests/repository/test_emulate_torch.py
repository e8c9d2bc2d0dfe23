"""tools/emulate_torch.py: the left-out tests exist, and commands are started correctly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loading import load_all

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "cpp_tests/gpu_machine/torch/left_out.toml"
PYTHON_TESTS = sorted((ROOT / "python_tests").rglob("test_*.py"))

modules = load_all("tools/emulate_torch.py")
emulate_torch, runs = modules["emulate_torch"], modules["emulate_torch_runs"]


def run_plugin(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Runs the tests of a folder, which writes counts.json there."""
    options = ["-p", "emulate_torch_plugin", "-c", os.devnull, "--counts", folder / "counts.json"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", folder, *options], cwd=folder, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")}, check=False,
    )  # fmt: skip


def test_what_is_left_out_exists_and_has_a_reason() -> None:
    for entry in tomllib.loads(LEFT_OUT.read_text())["left_out"]:
        assert entry["because"] and entry["tests"]
        for tests in entry["tests"]:
            file, _, name = tests.partition("::")
            (path,) = [path for path in PYTHON_TESTS if path.name == file]
            function = re.match(r"\w*", name)[0]
            assert re.search(rf"^def {function}", path.read_text(), re.MULTILINE), tests


def test_what_measures_time_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import pytest
@pytest.mark.timing
def test_time(): assert False
def test_value(): pass
""")
    done = run_plugin(tmp_path)
    assert done.returncode == 0
    assert json.loads((tmp_path / "counts.json").read_text()) == {
        "passed": 1, "failed": [], "skipped": {"left out: it measures time": 1}
    }  # fmt: skip


def test_commands_run_outside_of_the_checkout() -> None:
    command = emulate_torch.command_of(["--run", "axonn-ext", "doctor"])
    assert command == [emulate_torch.BIN / "axonn-ext", "doctor"]
    here = os.path.relpath(__file__)
    some = emulate_torch.command_of([f"{here}::test_it", "-k", "x"])
    assert some[0] == emulate_torch.BIN / "pytest"
    assert some[-3:] == [f"{Path(__file__).resolve()}::test_it", "-k", "x"]


def test_counts_of_several_files_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = runs.Counts()
    for name, failed in (("one", []), ("two", ["two.py::test_it"])):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"passed": 3, "failed": failed, "skipped": {"slow": 2}}))
        counts.add(path, f"{name}.py", 1 if failed else 0)
    counts.add(tmp_path / "absent.json", "three.py", 139)
    counts.add(tmp_path / "one.json", "four.py", 5)  # no test has this name any more
    counts.show("2 GPUs")
    shown = capsys.readouterr().out
    assert "2 GPUs: 10 tests marked gpu ran, 9 passed" in shown and "6 not run: slow" in shown
    assert "failed: two.py::test_it" in shown
    assert counts.ended == ["three.py: pytest ended with 139", "four.py: pytest ended with 5"]
    assert not counts.is_right()


def test_every_file_runs_on_the_whole_machine() -> None:
    found = runs.all_runs()
    whole = [path for run in found if run.machine == runs.WHOLE for path in run.paths]
    assert {
        f"python_tests/gpu/{path.name}" for path in (ROOT / "python_tests/gpu").glob("test_*")
    } < set(whole)
    assert {path for run in found for path in run.paths} == set(whole)
    assert len(set(whole)) == len(whole)
    assert all((ROOT / path).exists() for path in whole)


def test_a_run_has_the_variables_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = runs.Starter(
        command=lambda arguments: ["env"],
        environment=lambda wire: os.environ | {"WIRE": wire},
        folder=tmp_path,
    )
    run = runs.Run(runs.files("loss"), runs.ONE)
    monkeypatch.setenv("GPU_MACHINE_SM", "80")
    status, output = runs.execute(run, tmp_path / "1.json", [], starter)
    assert status == 0
    assert {"GPU_MACHINE_DEVICES=1", "GPU_MACHINE_SM=90"} <= set(output.splitlines())
    assert f"WIRE={tmp_path / '1.wire'}" in output.splitlines()
    assert "test_gpu_loss.py on 1 GPU of sm_90: " in output


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    assert run_plugin(tmp_path).returncode == 2
    assert len(json.loads((tmp_path / "counts.json").read_text())["failed"]) == 1


def test_only_the_machine_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "of the user")
    monkeypatch.setenv("GPU_MACHINE_DEVICES", "3")
    found = emulate_torch.environment("/a/folder")
    names = [Path(path).name for path in found["LD_PRELOAD"].split(":")]
    assert names == ["libcudart.so.13", "libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1"]
    assert found["GPU_MACHINE_DEVICES"] == "3" and found["GPU_MACHINE_WIRE"] == "/a/folder"
    assert found["PYTHONPATH"] == str(ROOT / "tools")
