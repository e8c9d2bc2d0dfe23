"""`axonn-ext doctor`: its findings here, and its conclusions for other machines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import axonn_ext
import commands
from axonn_ext.cli import doctor, main
from axonn_ext.kernels import extension, verified
from axonn_ext.spec import settings
from pretend_gpus import pretend_gpus


def test_report_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    findings = {(f["part"], f["name"]): f for f in json.loads(path.read_text())["findings"]}
    assert findings["versions", "torch"]["value"] == torch.__version__
    assert findings["versions", "axonn_ext"]["value"] == axonn_ext.__version__
    assert findings["CPU", "shared memory"]["status"] == "ok"
    assert "auto: fused" in findings["algorithms", "CPU tensors"]["value"]
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "shared memory" in printed


def test_a_problem_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = doctor.Finding("devices", "cuda:0", "sm_120", doctor.PROBLEM, "build again")
    monkeypatch.setattr(doctor, "diagnose", lambda: [bad])
    assert main(["doctor"]) == 1
    assert "problem: cuda:0: build again" in capsys.readouterr().out


def test_users_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--fast"]) == 2
    assert main(["doctor", "--json", "/nowhere/doctor.json"]) == 2
    assert "--json: there is no folder /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architectures", "version", "runs"),
    [
        ("sm_80,sm_90,compute_90", (8, 0), True),
        ("sm_80,sm_90,compute_90", (8, 9), True),  # code for 8.0 runs on every 8.x
        ("sm_80,sm_90,compute_90", (7, 5), False),
        ("sm_80,sm_90,compute_90", (12, 0), True),  # PTX for 9.0 is compiled at load time
        ("sm_80,sm_90", (12, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
    ],
)
def test_which_devices_compiled_code_runs_on(
    architectures: str, version: tuple[int, int], runs: bool
) -> None:
    assert doctor.runs_on(architectures.split(","), version) is runs


def test_without_shared_memory_sequential_is_the_default() -> None:
    (first, *_) = doctor.find_algorithms(can_share=False, cuda_kernels=set())
    assert "auto: sequential (no shared memory)" in first.value


@pytest.mark.skipif(extension.cuda is not None, reason="the CUDA parts are built")
def test_why_the_cuda_parts_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> doctor.Finding:
        return next(f for f in doctor.find_build() if f.name == "CUDA parts")

    # The reason that setup.py recorded when it built the installed package.
    assert found().value == f"not built: {extension.left_out()['_cuda']}"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "docs/install.md" in found().remedy
    monkeypatch.setattr(extension, "left_out", dict)
    assert found().value == "built, but its file _cuda.*.so is gone"


# --- ROCm, by the versions that such a torch states -----------------------------------------------


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.version, "cuda", None)


def test_rocm_is_not_a_cpu_build(rocm: None) -> None:
    report = doctor.diagnose()
    found = {(finding.part, finding.name): finding.value for finding in report}
    assert found["versions", "GPUs of torch"] == "ROCm 7.1.25424"
    assert found["build", "CUDA parts"] == "left out: torch is built for ROCm 7.1.25424"
    assert "No AMD GPU has run any of it yet" in found["algorithms", "ROCm"]
    for name in ("cublaslt", "fused_sm90", "communicators", "fill_random_"):
        assert name in found["algorithms", "ROCm"].partition("left out")[2]
    assert "RCCL" in found["algorithms", "linear_forward on CUDA"]
    assert not any("CPU build" in finding.value for finding in report)
    assert not any(finding.part == "verify" for finding in report)


def test_an_amd_gpu_is_named_by_its_own_architecture(
    rocm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MI250 has the same version number as an H100, 9.0."""
    properties = SimpleNamespace(
        name="AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0,
        total_memory=64 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    [finding] = doctor.find_devices()
    assert finding.value == "AMD Instinct MI250X, gfx90a, 64 GiB"


def test_what_verify_has_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    pretend_gpus(monkeypatch, ["NVIDIA H200"])
    [finding] = doctor.find_verified(settings.load())
    assert (finding.value, finding.status) == ("not run", doctor.NOTE)
    assert finding.remedy == (
        "fused kernels: not verified on NVIDIA H200; `axonn-ext verify` (3 minutes, once per "
        "machine) unlocks them"
    )
    [key] = extension.stamp_keys()
    verdicts = {"fused": verified.Verdict(ranks=4), "fused_sm90": verified.Verdict()}
    verified.keep(tmp_path, verified.Stamp(key, verdicts))
    [finding] = doctor.find_verified(settings.load())
    assert finding.value == "fused right on 4 GPUs, fused_sm90 right"
    assert (finding.status, finding.remedy) == (doctor.OK, "")
    wrong = verified.Verdict(reasons={"products": "wrong"})
    verified.keep(tmp_path, verified.Stamp(key, verdicts | {"triton": wrong}))
    [finding] = doctor.find_verified(settings.load())
    assert finding.value == "fused right on 4 GPUs, triton FAILED, fused_sm90 right"
    assert (finding.status, finding.remedy) == (doctor.NOTE, "")


def test_what_verify_cannot_find_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, ["NVIDIA V100"], why_none="it needs sm_80")
    [finding] = doctor.find_verified(settings.load())
    assert finding.value == "fused kernels: none on NVIDIA V100: it needs sm_80"
    assert (finding.status, finding.remedy) == (doctor.OK, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    [finding] = doctor.find_verified(settings.load())
    assert (finding.value, finding.status) == ("torch does not see it", doctor.OK)


def test_a_gpu_that_the_driver_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, ["NVIDIA H200"], driver_names=[])
    [finding] = doctor.find_verified(settings.load())
    assert finding.name == "NVIDIA H200" and "does not name this GPU" in finding.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_said_of_verify() -> None:
    assert doctor.find_verified(settings.load()) == []


WITHOUT = """
import sys
sys.modules["axonn_ext._C"] = None  # as of one that cannot be loaded
from axonn_ext.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_extension_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = commands.run([sys.executable, "-c", WITHOUT, "doctor", "--json", str(path)])
    assert done.status == 1 and "Traceback" not in done.output
    text = "axonn_ext's compiled extension cannot be loaded. Build it against the torch that is"
    assert f"problem: compiled parts: {text}" in done.output
    findings = {(f["part"], f["name"]): f for f in json.loads(path.read_text())["findings"]}
    assert findings["versions", "torch"]["value"] == torch.__version__
    assert findings["build", "compiled parts"]["status"] == "problem"

    done = commands.run([sys.executable, "-c", WITHOUT, "tune", "--shapes", "64,64,64"])
    assert done.status == 1
    [line] = done.output.splitlines()
    assert line.startswith(f"error: {text}") and "(the cause: " in line
