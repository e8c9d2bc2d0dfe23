"""tools/emulate_torch.py: what is left out is there, and how a command is started."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from loading import load_all

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "cpp_tests/gpu_machine/torch/left_out.toml"
PYTHON_TESTS = sorted((ROOT / "python_tests").rglob("test_*.py"))


@pytest.fixture(scope="module")
def emulate_torch() -> ModuleType:
    return load_all("tools/emulate_torch.py")["emulate_torch"]


def test_what_is_left_out_exists_and_has_a_reason() -> None:
    for entry in tomllib.loads(LEFT_OUT.read_text())["left_out"]:
        assert entry["because"]
        for tests in entry["tests"]:
            file, _, name = tests.partition("::")
            (path,) = [path for path in PYTHON_TESTS if path.name == file]
            function = re.match(r"\w*", name)[0]
            assert re.search(rf"^def {function}", path.read_text(), re.MULTILINE), tests


def test_commands_run_outside_of_the_checkout(emulate_torch: ModuleType) -> None:
    command = emulate_torch.command_of(["--run", "axonn-ext", "doctor"])
    assert command == [emulate_torch.BIN / "axonn-ext", "doctor"]
    some = emulate_torch.command_of(["file.py", "-k", "x"])
    assert some[0] == emulate_torch.BIN / "pytest" and some[-3:] == ["file.py", "-k", "x"]


def test_counts_of_several_files_are_added(
    emulate_torch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = emulate_torch.Counts()
    for name, failed in (("one", []), ("two", ["two.py::test_it"])):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"passed": 3, "failed": failed, "skipped": {"slow": 2}}))
        counts.add(path, f"{name}.py")
    counts.add(tmp_path / "absent.json", "three.py")
    counts.show()
    shown = capsys.readouterr().out
    assert "7 tests marked gpu ran, 6 passed" in shown and "4 not run: slow" in shown
    assert "failed: two.py::test_it" in shown and "three.py: pytest ended" in shown


def test_only_the_machine_is_preloaded(
    emulate_torch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "of the user")
    monkeypatch.setenv("GPU_MACHINE_DEVICES", "3")
    found = emulate_torch.environment("/a/folder")
    names = [Path(path).name for path in found["LD_PRELOAD"].split(":")]
    assert names == ["libcudart.so.13", "libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1"]
    assert found["GPU_MACHINE_DEVICES"] == "3" and found["GPU_MACHINE_WIRE"] == "/a/folder"
    assert found["PYTHONPATH"] == str(ROOT / "tools")
