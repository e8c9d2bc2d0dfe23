"""The wheel: what it holds, that it runs where the checkout is not, and what setup.py decides."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(600)  # the wheel compiles everything where nothing was built yet

ROOT = Path(__file__).resolve().parent.parent

# Run by every rank, in the environment that the wheel was installed into.
USE_THE_WHEEL = """
import importlib.metadata, sys
from pathlib import Path

import torch
import torch.distributed as dist

import axonn_ext

rank, world_size, store, prefix, version = sys.argv[1:]
rank, world_size = int(rank), int(world_size)
assert Path(axonn_ext.__file__).is_relative_to(prefix), axonn_ext.__file__
assert importlib.metadata.version("axonn-ext") == version
assert axonn_ext.__version__ == version, axonn_ext.__version__

dist.init_process_group(
    "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
)
generator = torch.Generator().manual_seed(0)
a = torch.randn(6, 5, generator=generator, dtype=torch.float64)
b = torch.randn(5, 7, generator=generator, dtype=torch.float64)
y = axonn_ext.ops.all_gather_matmul(a.chunk(world_size)[rank], b, dist.group.WORLD)
torch.testing.assert_close(y, a @ b)
dist.barrier()
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path, timeout: float = 600) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        # What a developer has set must not lead back to the checkout.
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def project() -> dict[str, str]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, made in seconds, since the objects in build/ are used again."""
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools packs whatever it finds there, modules that were removed since included.
    for stale in (ROOT / "build").glob("*/lib.*"):
        shutil.rmtree(stale)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.endswith(".so")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "axonn_ext").rglob("*")
        if path.suffix in (".py", ".pyi", ".toml") or path.name == "py.typed"
    }
    assert len(compiled) == 1
    assert compiled.pop().startswith("axonn_ext/_C.")
    assert {name for name in names if not name.endswith(".so")} == sources
    assert "axonn_ext/py.typed" in names


def test_wheel_is_named_after_the_version(wheel: Path) -> None:
    assert wheel.name.startswith(f"axonn_ext-{project()['version']}-cp3")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and with the dependencies of the running one in sight."""
    prefix = tmp_path_factory.mktemp("environment").resolve()
    venv.create(prefix, with_pip=False)
    run(
        *(sys.executable, "-m", "pip", "--python", prefix / "bin" / "python"),
        *("install", "--no-deps", "--no-index", wheel),
        cwd=prefix,
    )
    # Folders named in a .pth file are searched, but their own .pth files are not run, so that the
    # finder of an editable install stays out.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages,) = prefix.glob("lib/python3*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return prefix


@pytest.mark.parametrize("world_size", [1, 2])
def test_installed_wheel_runs_an_op(installed: Path, tmp_path: Path, world_size: int) -> None:
    script = tmp_path / "use_the_wheel.py"
    script.write_text(USE_THE_WHEEL)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    ranks = [
        subprocess.Popen(
            [
                *(installed / "bin" / "python", script, str(rank), str(world_size)),
                *(tmp_path / "store", installed, project()["version"]),
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)


def test_installed_command_line_is_there(installed: Path) -> None:
    assert (installed / "bin" / "axonn-ext").is_file()


# --- What setup.py decides -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("axonn_ext_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the annotations
    spec.loader.exec_module(module)
    return module


FOUND = {"torch_cuda": "13.0", "nvcc": "13.2", "sources": ["csrc/core/x.cu"], "nccl": "nccl.h"}


@pytest.mark.parametrize("request_", [None, "", "1"])
def test_cuda_is_built_where_all_is_found(setup_py: ModuleType, request_: str | None) -> None:
    assert setup_py.choose_cuda(request_, **FOUND).build


@pytest.mark.parametrize(
    ("lacking", "word"),
    [
        ({"torch_cuda": None}, "torch"),
        ({"nvcc": None}, "nvcc"),
        ({"sources": []}, "no CUDA sources"),
        ({"nvcc": "12.8"}, "nvcc is of CUDA 12.8 but torch of CUDA 13.0"),
        ({"nccl": None}, "nccl.h was not found"),
        ({"cublas": None}, "cublasLt.h was not found"),
    ],
)
def test_cuda_that_lacks_something(
    setup_py: ModuleType, lacking: dict[str, object], word: str
) -> None:
    choice = setup_py.choose_cuda(None, **FOUND | lacking)
    assert not choice.build
    assert word in choice.reason
    with pytest.raises(SystemExit, match=f"AXONN_CUDA=1 demands .*{word}"):
        setup_py.choose_cuda("1", **FOUND | lacking)


def test_cuda_can_be_turned_off(setup_py: ModuleType) -> None:
    assert not setup_py.choose_cuda("0", **FOUND).build


def test_cuda_request_is_checked(setup_py: ModuleType) -> None:
    with pytest.raises(SystemExit, match="AXONN_CUDA must be 0, 1 or unset, got 'yes'"):
        setup_py.choose_cuda("yes", **FOUND)


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_of_cuda_home_comes_before_the_wheel_and_the_path(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = make_program(tmp_path / "toolkit" / "bin" / "nvcc")
    wheel = make_program(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc")
    system = make_program(tmp_path / "system" / "nvcc")
    monkeypatch.setenv("PATH", str(system.parent))
    wheels = setup_py.find_wheels([str(tmp_path / "site"), str(tmp_path / "none")])
    assert wheels == (wheel.parent.parent,)
    assert setup_py.find_nvcc(str(tmp_path / "toolkit"), wheels) == str(toolkit)
    assert setup_py.find_nvcc(str(tmp_path / "empty"), wheels) == str(wheel)
    assert setup_py.find_nvcc(None, ()) == str(system)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py.find_nvcc(None, ()) is None


def test_home_is_where_nvcc_says_it_is(setup_py: ModuleType) -> None:
    version = "Cuda compilation tools, release 13.0, V13.0.88\n"
    dryrun = "#$ _SPACE_= \n#$ _HERE_=/opt/cuda-13.0/bin\n#$ _THERE_=/opt/cuda-13.0/bin\n"
    assert setup_py.parse_nvcc(version, dryrun) == ("13.0", Path("/opt/cuda-13.0"))
    assert setup_py.parse_nvcc("no compiler", "") is None


def test_libraries_of_wheels_come_before_the_toolkits(setup_py: ModuleType, tmp_path: Path) -> None:
    for path in ("wheel/lib/libcudart.so.13", "home/lib64/libcudart.so", "home/lib64/libextra.so"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    toolkit = setup_py.Toolkit(tmp_path / "home", "13.0", (tmp_path / "wheel",))
    assert toolkit.find_library("cudart") == tmp_path / "wheel/lib/libcudart.so.13"
    assert toolkit.find_library("extra") == tmp_path / "home/lib64/libextra.so"
    assert toolkit.find_library("absent") is None


@pytest.mark.parametrize("arch_list", [None, "", "8.0;9.0+PTX", " 8.0 9.0+PTX "])
def test_architectures(setup_py: ModuleType, arch_list: str | None) -> None:
    assert setup_py.gencode_flags(arch_list) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )


@pytest.mark.parametrize("word", ["Hopper", "90", "9.0+ptx", "9.0b"])
def test_bad_architectures_are_named(setup_py: ModuleType, word: str) -> None:
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST must list versions"):
        setup_py.gencode_flags(f"8.0;{word}")


def test_each_architecture_with_files_of_its_own_has_a_module(setup_py: ModuleType) -> None:
    sources = ["a/fill.cu", "a/gemm_sm90.cu", "a/gemm_sm100.cu", "a/copy_sm80.cu"]
    modules = {m.name: m for m in setup_py.kernel_modules(sources, "8.0;9.0a;12.0+PTX")}
    assert {name: m.sources for name, m in modules.items()} == {
        "axonn_ext._cuda": ["a/fill.cu"],
        "axonn_ext._cuda_sm90": ["a/gemm_sm90.cu"],
        "axonn_ext._cuda_sm80": ["a/copy_sm80.cu"],
    }
    # 10.0 was not asked for; what is for one architecture alone sees no flag of another.
    assert modules["axonn_ext._cuda_sm90"].flags == ("-gencode=arch=compute_90a,code=sm_90a",)
    assert modules["axonn_ext._cuda_sm80"].flags == ("-gencode=arch=compute_80,code=sm_80",)


# --- What tools/cuda_check.py concludes ----------------------------------------------------------

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


@pytest.fixture(scope="module")
def cuda_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_check", ROOT / "tools" / "cuda_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("usage", "problems"),
    [
        ({"registers": 40, "stack": 0, "local": 0}, []),
        ({"registers": 255, "stack": 0, "local": 0}, ["_Z4fillv for sm_90 uses 255 registers"]),
        ({"registers": 40, "stack": 0, "local": 16}, ["_Z4fillv for sm_90 uses 16 bytes of local"]),
        ({"registers": 40, "stack": 8, "local": 0}, ["local memory and a stack of 8"]),
    ],
)
def test_kernels_that_spill_are_found(
    cuda_check: ModuleType, usage: dict[str, int], problems: list[str]
) -> None:
    kernels = cuda_check.parse_resource_usage(RESOURCE_USAGE.format(**usage))
    assert [kernel.architecture for kernel in kernels] == ["sm_80", "sm_90"]
    found = cuda_check.kernel_problems(kernels, cuda_check.MODULES["_cuda"])
    assert len(found) == len(problems)
    assert all(problem in text for problem, text in zip(problems, found, strict=True))


def test_an_architecture_without_code_is_found(cuda_check: ModuleType) -> None:
    text = RESOURCE_USAGE.format(registers=1, stack=0, local=0).replace("sm_90", "sm_80")
    kernels = cuda_check.parse_resource_usage(text)
    module = cuda_check.MODULES["_cuda"]
    assert cuda_check.kernel_problems(kernels, module) == ["there is no code for sm_90"]


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
def test_gemms_must_have_their_instructions(
    cuda_check: ModuleType, opcode: str, other: str, problem: str | None
) -> None:
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
    cuda_check: ModuleType, part: str, other: str, problems: list[str]
) -> None:
    sums = cuda_check.parse_sass(SUM_SASS.replace(part, other) if part else SUM_SASS)
    found = cuda_check.sum_problems(sums)
    assert bool(found) == bool(problems)
    assert all(any(problem in line for line in found) for problem in problems)


def test_cutlass_is_found(setup_py: ModuleType, tmp_path: Path) -> None:
    header = tmp_path / "cutlass_library/source/include/cutlass/cutlass.h"
    assert setup_py.find_cutlass(None, [str(tmp_path)]) is None
    header.parent.mkdir(parents=True)
    header.touch()
    include = header.parent.parent
    assert setup_py.find_cutlass(None, ["/nowhere", str(tmp_path)]) == include
    assert setup_py.find_cutlass(str(include.parent), []) == include
    with pytest.raises(SystemExit, match="CUTLASS_HOME=/nowhere has no include/cutlass"):
        setup_py.find_cutlass("/nowhere", [str(tmp_path)])
