"""The commands that tools/cuda_check.py runs, and its conclusions from machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from loading import load

ROOT = Path(__file__).resolve().parents[2]
cuda_check = load("tools/cuda_check.py")


RESOURCE_USAGE = """
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z4fillv:
  REG:38 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function _Z4fillv:
  REG:{registers} STACK:{stack} SHARED:0 LOCAL:{local} CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize(
    ("usage", "problems"),
    [
        ({"registers": 40, "stack": 0, "local": 0}, []),
        ({"registers": 255, "stack": 0, "local": 0}, ["_Z4fillv for sm_90 uses 255 registers"]),
        ({"registers": 40, "stack": 0, "local": 16}, ["_Z4fillv for sm_90 uses 16 bytes of local"]),
        ({"registers": 40, "stack": 8, "local": 0}, ["local memory and a stack of 8"]),
    ],
)
def test_kernels_that_spill_are_found(usage: dict[str, int], problems: list[str]) -> None:
    kernels = cuda_check.parse_resource_usage(RESOURCE_USAGE.format(**usage))
    assert [kernel.architecture for kernel in kernels] == ["sm_80", "sm_90"]
    found = cuda_check.kernel_problems(kernels, cuda_check.MODULES["_cuda"])
    assert len(found) == len(problems)
    assert all(problem in text for problem, text in zip(problems, found, strict=True))


def test_an_architecture_without_code_is_found() -> None:
    text = RESOURCE_USAGE.format(registers=1, stack=0, local=0).replace("sm_90", "sm_80")
    kernels = cuda_check.parse_resource_usage(text)
    module = cuda_check.MODULES["_cuda"]
    assert cuda_check.kernel_problems(kernels, module) == ["there is no code for sm_90"]


def handshake_usage(architecture: str, registers: int) -> str:
    """cuobjdump's resource usage of csrc/core/cuda/fused/handshake.cu."""
    lines = [f"arch = {architecture}"]
    for kernel in ("begin", "raise", "await", "await_own", "end"):
        lines.append(
            f" Function _ZN5axonn45_GLOBAL__N__a9_12_handshake_cu_c212{kernel}_kernelENS1_:"
        )
        lines.append(f"  REG:{registers} STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:560")
    return "\n".join(lines)


def test_a_handshake_that_does_not_fit_beside_a_gemm_is_found() -> None:
    module = cuda_check.MODULES["_cuda"]
    for registers, number in ((32, 0), (33, 5)):
        text = "\n".join(handshake_usage(arch, registers) for arch in module.architectures)
        kernels = cuda_check.parse_resource_usage(text)
        assert cuda_check.handshake_problems(kernels, module) == []
        problems = cuda_check.kernel_problems(kernels, module)
        assert len(problems) == number * len(module.architectures)
        assert all("does not fit on an SM next to a GEMM" in problem for problem in problems)
    kernels = cuda_check.parse_resource_usage(handshake_usage("sm_90", 16).replace("raise", "lift"))
    assert cuda_check.handshake_problems(kernels, module) == [
        "0 kernels of the handshake for sm_80, not 5",
        "4 kernels of the handshake for sm_90, not 5",
    ]


GEMM_SASS = """
        Function : _Z4gemmDepartureEpilogue
    /*0000*/  LDG.E.STRONG.SYS R2, desc[UR4][R2.64] ;
    /*0010*/  FENCE.VIEW.ASYNC.G ;
    /*0020*/  UTMALDG.3D.MULTICAST [UR8], [UR4] ;
    /*0030*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
    /*0040*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
    /*0050*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
    /*0060*/  UTMASTG.3D [UR4], [UR8] ;
    /*0070*/  ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R5 ;
    /*0080*/  STG.E.STRONG.SYS desc[UR4][R2.64], R5 ;
"""


@pytest.mark.parametrize(
    ("opcode", "other", "problem"),
    [
        ("", "", None),
        ("HGMMA", "HMMA", "has no HGMMA"),
        ("UTMALDG", "LDGSTS", "has no UTMALDG"),
        ("UTMASTG", "STG", "has no UTMASTG"),
        ("FENCE", "NOP", "has no FENCE"),
        ("LDG.E.STRONG.SYS", "LDG.E", "the acquire of flags"),
        ("ATOMG.E.ADD.STRONG.GPU", "ATOMG.E.ADD", "the count of a chunk's tiles"),
        ("STG.E.STRONG.SYS", "STG.E", "the release of a flag"),
        ("UTMASTG", "WARPGROUP.DEPBAR ;\n UTMASTG", "serialised"),
    ],
)
def test_gemms_must_have_their_instructions(opcode: str, other: str, problem: str | None) -> None:
    text = GEMM_SASS.replace(opcode, other) if opcode else GEMM_SASS
    ((name, sass),) = cuda_check.parse_sass(text).items()
    found = cuda_check.gemm_problems(name, sass)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


SUM_SASS = """
        Function : _Z17sum_to_all_kernelI6__halfLb0EEv
    /*0000*/  STG.E.128 desc[UR4][R14.64], R8 ;
        Function : _Z17sum_to_all_kernelI6__halfLb1EEv
    /*0000*/  STG.E.128.STRONG.SYS desc[UR4][R16.64], R4 ;
        Function : _Z17sum_to_all_kernelI13__nv_bfloat16Lb0EEv
    /*0000*/  STG.E.128 desc[UR4][R14.64], R8 ;
        Function : _Z17sum_to_all_kernelI13__nv_bfloat16Lb1EEv
    /*0000*/  STG.E.128.STRONG.SYS desc[UR4][R16.64], R4 ;
"""


@pytest.mark.parametrize(
    ("part", "other", "problems"),
    [
        ("", "", []),
        (".128.STRONG.SYS", ".STRONG.SYS", ["has no STG", "multicast stores of 16 bytes"]),
        ("STG.E.128 ", "STG.E.64 ", ["has no STG", "stores of 16 bytes"]),
        ("Lb1E", "Lb2E", ["0 sums of the form Lb1E, not one for each of 2 dtypes"]),
    ],
)
def test_sums_for_all_ranks_must_have_their_stores(
    part: str, other: str, problems: list[str]
) -> None:
    sums = cuda_check.parse_sass(SUM_SASS.replace(part, other) if part else SUM_SASS)
    found = cuda_check.sum_problems(sums)
    assert bool(found) == bool(problems)
    assert all(any(problem in line for line in found) for problem in problems)


SWITCH_SUM_SASS = """
        Function : _Z17switch_sum_kernelI6__halfEv
    /*0000*/  LDGMC.E.F32ADD.F16x8.RN.STRONG.SYS R32, [R62.64+URZ] ;
    /*0010*/  STG.E.128.STRONG.SYS desc[UR4][R16.64], R32 ;
        Function : _Z17switch_sum_kernelI13__nv_bfloat16Ev
    /*0000*/  LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS R32, [R62.64+URZ] ;
    /*0010*/  STG.E.128.STRONG.SYS desc[UR4][R16.64], R32 ;
"""


@pytest.mark.parametrize(
    ("part", "other", "problems"),
    [
        ("", "", []),
        ("F32ADD.F16x8", "ADD.F16x8", ["has no LDGMC", "added in fp32"]),
        ("F32ADD.BF16x8", "ADD.BF16x8", ["has no LDGMC", "added in fp32"]),
        (".128.STRONG.SYS", ".STRONG.SYS", ["multicast stores of 16 bytes"]),
        ("6__half", "float", ["0 sums in the switch of the dtype 6__half, not one"]),
    ],
)
def test_sums_in_the_switch_must_have_their_loads(
    part: str, other: str, problems: list[str]
) -> None:
    text = SWITCH_SUM_SASS.replace(part, other) if part else SWITCH_SUM_SASS
    found = cuda_check.switch_sum_problems(cuda_check.parse_sass(text))
    assert bool(found) == bool(problems)
    assert all(any(problem in line for line in found) for problem in problems)


INSTALL = """
## Two commands

    make demo

## With CUDA

Some words.

    pip install 'a b'
    AXONN_CUDA=1 pip install .

More words.

## Ten lines

    make test
"""


def test_commands_of_the_readme_are_found() -> None:
    found = cuda_check.install_commands(INSTALL)
    assert found == ["pip install 'a b'", "AXONN_CUDA=1 pip install ."]
    with pytest.raises(cuda_check.CheckError, match="no commands in a section '## With CUDA'"):
        cuda_check.install_commands(INSTALL.replace("## With CUDA", "## On GPUs"))


def test_readme_has_commands_that_end_with_the_build() -> None:
    *prepare, build = cuda_check.install_commands((ROOT / cuda_check.PAGE).read_text())
    assert all(command.startswith("pip install ") for command in prepare)
    assert build.startswith("AXONN_CUDA=1 pip install ") and build.endswith(" .")


def test_commands_run_in_an_environment_that_is_kept_while_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = []

    def run_logged(command: list[str | Path], *, environment: object = None, **_: object) -> None:
        if "venv" in command:
            created.append(command)
            bin_ = tmp_path / ".venv-cuda" / "bin"
            bin_.mkdir(parents=True)
        else:
            subprocess.run(command, env=environment, cwd=tmp_path, check=True)  # type: ignore[call-overload]

    monkeypatch.setattr(cuda_check, "run_logged", run_logged)
    monkeypatch.setattr(cuda_check, "VENV", tmp_path / ".venv-cuda")
    monkeypatch.setattr(cuda_check, "COMPLETE", tmp_path / ".venv-cuda" / "complete")
    monkeypatch.setenv("CUDA_HOME", "/of/the/user")
    commands = ["echo prepare >>log", "echo build ${CUDA_HOME-none} $VIRTUAL_ENV >>log"]
    last = f"build none {tmp_path}/.venv-cuda"
    cuda_check.run_commands(commands)
    cuda_check.run_commands(commands)
    assert (tmp_path / "log").read_text().split("\n") == ["prepare", last, last, ""]
    assert len(created) == 1
    cuda_check.run_commands(["echo another >>log", *commands[1:]])
    assert (tmp_path / "log").read_text().split("\n")[3:] == ["another", last, ""]
    assert len(created) == 2


def test_the_image_for_gpus_is_built_by_the_same_commands() -> None:
    image = (ROOT / "tools" / "Dockerfile").read_text().partition(" AS cuda\n")[2]
    commands = cuda_check.install_commands((ROOT / cuda_check.PAGE).read_text())
    assert [line.split(" && ")[0] for line in re.findall(r"^RUN (.*)$", image, re.M)] == commands
