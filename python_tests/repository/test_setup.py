"""setup.py and its modules in tools/: what they find, and what they decide to build."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from loading import load_all

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

modules = load_all("setup.py")
setup_py, find_cuda = modules["setup"], modules["find_cuda"]
build_jobs, architectures = modules["build_jobs"], modules["architectures"]


FOUND = {"torch_cuda": "13.0", "nvcc": "13.2", "sources": ["csrc/core/x.cu"], "nccl": "nccl.h"}


@pytest.mark.parametrize("request_", [None, "", "1"])
def test_cuda_is_built_where_all_is_found(request_: str | None) -> None:
    assert setup_py.choose_cuda(request_, **FOUND).build


@pytest.mark.parametrize(
    ("lacking", "word"),
    [
        ({"torch_cuda": None}, "torch"),
        ({"torch_cuda": None, "torch_hip": "7.1.25424"}, "torch is built for ROCm 7.1.25424"),
        ({"nvcc": None}, "nvcc"),
        ({"sources": []}, "no CUDA sources"),
        ({"nvcc": "12.8"}, "nvcc is of CUDA 12.8 but torch of CUDA 13.0"),
        ({"nccl": None}, "nccl.h was not found"),
        ({"cublas": None}, "cublasLt.h was not found"),
    ],
)
def test_cuda_that_lacks_something(lacking: dict[str, object], word: str) -> None:
    choice = setup_py.choose_cuda(None, **FOUND | lacking)
    assert not choice.build
    assert word in choice.reason
    with pytest.raises(SystemExit, match=f"AXONN_CUDA=1 demands .*{word}"):
        setup_py.choose_cuda("1", **FOUND | lacking)


def test_cuda_can_be_turned_off() -> None:
    assert setup_py.choose_cuda("0", **FOUND) == find_cuda.CudaChoice(False, "AXONN_CUDA=0")
    choice = setup_py.choose_cuda("0", **FOUND, because="there is no GPU")
    assert choice == find_cuda.CudaChoice(False, "there is no GPU")
    # Missing requirements are reported first: requesting the CUDA parts would be useless.
    choice = setup_py.choose_cuda("0", **FOUND | {"nvcc": None}, because="there is no GPU")
    assert not choice.build and "nvcc was not found" in choice.reason


def test_cuda_request_is_checked() -> None:
    with pytest.raises(SystemExit, match="AXONN_CUDA must be 0, 1 or unset, got 'yes'"):
        setup_py.choose_cuda("yes", **FOUND)


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_of_cuda_home_comes_before_the_wheel_and_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = make_program(tmp_path / "toolkit" / "bin" / "nvcc")
    wheel = make_program(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc")
    system = make_program(tmp_path / "system" / "nvcc")
    monkeypatch.setenv("PATH", str(system.parent))
    wheels = setup_py.find_wheels([str(tmp_path / "site"), str(tmp_path / "none")])
    assert wheels == (wheel.parent.parent,)
    assert find_cuda.find_nvcc(str(tmp_path / "toolkit"), wheels) == str(toolkit)
    assert find_cuda.find_nvcc(str(tmp_path / "empty"), wheels) == str(wheel)
    assert find_cuda.find_nvcc(None, ()) == str(system)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_cuda.find_nvcc(None, ()) is None


def test_home_is_where_nvcc_says_it_is() -> None:
    version = "Cuda compilation tools, release 13.0, V13.0.88\n"
    dryrun = "#$ _SPACE_= \n#$ _HERE_=/opt/cuda-13.0/bin\n#$ _THERE_=/opt/cuda-13.0/bin\n"
    assert find_cuda.parse_nvcc(version, dryrun) == ("13.0", Path("/opt/cuda-13.0"))
    assert find_cuda.parse_nvcc("no compiler", "") is None


def test_libraries_of_wheels_come_before_the_toolkits(tmp_path: Path) -> None:
    for path in ("wheel/lib/libcudart.so.13", "home/lib64/libcudart.so", "home/lib64/libextra.so"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    toolkit = setup_py.Toolkit(tmp_path / "home", "13.0", (tmp_path / "wheel",))
    assert toolkit.find_library("cudart") == tmp_path / "wheel/lib/libcudart.so.13"
    assert toolkit.find_library("extra") == tmp_path / "home/lib64/libextra.so"
    assert toolkit.find_library("absent") is None


@pytest.mark.parametrize("arch_list", [None, "", "8.0;9.0+PTX", " 8.0 9.0+PTX "])
def test_architectures(arch_list: str | None) -> None:
    assert architectures.gencode_flags(arch_list) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )


@pytest.mark.parametrize(
    ("arch_list", "asked"),
    [
        ("Hopper", "90 90+PTX"),
        ("Ampere", "80 86 86+PTX"),
        ("Ada Hopper", "89 89+PTX 90 90+PTX"),
        ("Blackwell;8.0", "80 100 103 120 121 121+PTX"),
        ("9.0a", "90a"),
        ("8.0,9.0a+PTX", "80 90a 90a+PTX"),
    ],
)
def test_architectures_are_read_as_torch_reads_them(
    monkeypatch: pytest.MonkeyPatch, arch_list: str, asked: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "of the user")
    flags = architectures.gencode_flags(arch_list)
    found = re.findall(r"arch=compute_(\w+),code=(sm|compute)_\1", " ".join(flags))
    assert len(found) == len(flags)
    words = [number + ("+PTX" if kind == "compute" else "") for number, kind in found]
    assert words == asked.split()
    # Modules for sm_90 are built if it is requested by any name.
    names = [
        m.name for m in architectures.kernel_modules(["a/fill.cu", "a/gemm_sm90.cu"], arch_list)
    ]
    assert ("axonn_ext._cuda_sm90" in names) == ("90" in asked)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "of the user"


@pytest.mark.parametrize("word", ["Hoper", "Hopper+PTX", "90", "9.0+ptx", "9.0b"])
def test_bad_architectures_are_named(word: str) -> None:
    message = "TORCH_CUDA_ARCH_LIST must list versions .* or names such as Hopper"
    with pytest.raises(SystemExit, match=message):
        architectures.gencode_flags(f"8.0;{word}")


def test_each_architecture_with_files_of_its_own_has_a_module() -> None:
    sources = ["a/fill.cu", "a/gemm_sm90.cu", "a/gemm_sm100.cu", "a/copy_sm80.cu"]
    modules = {m.name: m for m in architectures.kernel_modules(sources, "8.0;9.0a;12.0+PTX")}
    assert {name: m.sources for name, m in modules.items()} == {
        "axonn_ext._cuda": ["a/fill.cu"],
        "axonn_ext._cuda_sm90": ["a/gemm_sm90.cu"],
        "axonn_ext._cuda_sm80": ["a/copy_sm80.cu"],
    }
    # 10.0 was not requested; modules for one architecture get no flags of another.
    assert modules["axonn_ext._cuda_sm90"].flags == ("-gencode=arch=compute_90a,code=sm_90a",)
    assert modules["axonn_ext._cuda_sm80"].flags == ("-gencode=arch=compute_80,code=sm_80",)
    with_ptx = {m.name: m for m in architectures.kernel_modules(sources, "8.0;9.0+PTX")}
    assert with_ptx["axonn_ext._cuda_sm80"].flags == ("-gencode=arch=compute_80,code=sm_80",)
    assert with_ptx["axonn_ext._cuda_sm90"].flags == (
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    )


def test_modules_that_are_left_out_are_named() -> None:
    sources = ["a/fill.cu", "a/gemm_sm90.cu"]

    def choose(arch_list: str | None, *, lacking: str | None, demanded: bool = False) -> object:
        modules, left_out = architectures.choose_modules(
            sources, arch_list, lacking=lacking, demanded=demanded
        )
        return [module.name for module in modules], left_out

    both = ["axonn_ext._cuda", "axonn_ext._cuda_sm90"]
    assert choose(None, lacking=None) == (both, {})
    why = "9.0 is not in TORCH_CUDA_ARCH_LIST=Ampere"
    assert choose("Ampere", lacking="x", demanded=True) == (both[:1], {"_cuda_sm90": why})
    assert choose(None, lacking="no CUTLASS") == (both[:1], {"_cuda_sm90": "no CUTLASS"})
    with pytest.raises(SystemExit, match=r"AXONN_CUDA=1 demands .*no CUTLASS"):
        choose(None, lacking="no CUTLASS", demanded=True)


def test_what_cutlass_lacks_is_named(tmp_path: Path) -> None:
    toolkit = find_cuda.Toolkit(tmp_path, "13.0", (tmp_path / "wheel",))
    assert find_cuda.what_cutlass_lacks(None, toolkit) == find_cuda.NO_CUTLASS
    assert find_cuda.what_cutlass_lacks(tmp_path, toolkit) == find_cuda.NO_CCCL
    for place in ("include/cuda/std", "wheel/include/cccl/cuda/std"):
        header = tmp_path / place / "cstdint"
        header.parent.mkdir(parents=True)
        header.touch()
        assert find_cuda.what_cutlass_lacks(tmp_path, toolkit) is None
        header.unlink()


def test_what_was_left_out_is_compiled_into_the_package(tmp_path: Path) -> None:
    source = Path(setup_py.write_left_out(tmp_path, {"_cuda": 'no "nvcc"'}))
    program = (
        source.read_text()
        + """
        #include <cstdio>
        int main() {
          for (auto& part : axonn::ops::left_out())
            printf("%s: %s", part.first.c_str(), part.second.c_str());
        }"""
    )
    compile_ = ["c++", "-std=c++20", "-I", str(ROOT / "csrc"), "-x", "c++", "-"]
    binary = tmp_path / "print_left_out"
    subprocess.run([*compile_, "-o", str(binary)], input=program, text=True, check=True)
    assert subprocess.check_output([binary], text=True) == '_cuda: no "nvcc"'
    # An unchanged text is not written again, so nothing is recompiled.
    before = source.stat().st_mtime_ns
    setup_py.write_left_out(tmp_path, {"_cuda": 'no "nvcc"'})
    assert source.stat().st_mtime_ns == before
    setup_py.write_left_out(tmp_path, {})
    assert "return {};" in source.read_text()


def test_modules_of_an_earlier_build_are_removed(tmp_path: Path) -> None:
    for name in (f"_C{SUFFIX}", f"_cuda{SUFFIX}", "_C.cpython-30.so", "_version.py"):
        (tmp_path / name).touch()
    setup_py.remove_modules(tmp_path, keep=["_C"])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"_C{SUFFIX}", "_C.cpython-30.so", "_version.py"}


def test_headers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precompile = modules["precompile"]
    monkeypatch.setattr(precompile, "HEADERS", ("vector", "string"))
    compiled = tmp_path / "torch_headers.h.gch"
    command = ["c++", "-std=c++20", "-O3", f"-I{tmp_path}"]
    flags = precompile.precompile(tmp_path, command)
    first = compiled.stat().st_mtime_ns, (tmp_path / f"{compiled.name}.sum").read_text()
    (tmp_path / "a.cpp").write_text("std::vector<std::string> empty() { return {}; }\n")
    compile_it = [*command, *flags, "-Werror", "-H", "-c", "a.cpp", "-o", "a.o"]
    done = subprocess.run(compile_it, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"! {compiled}" in done.stderr, "g++ tells which compiled headers it has used"
    assert "/vector" not in done.stderr

    def state(*changed: str) -> tuple[int, str]:
        precompile.precompile(tmp_path, changed or command)
        return compiled.stat().st_mtime_ns, (tmp_path / f"{compiled.name}.sum").read_text()

    assert state() == first
    elsewhere = state(*command[:-1], f"-I{tmp_path / 'elsewhere'}")
    assert elsewhere == first, "paths decide nothing"
    other = state(*command, "-DAXONN_TORCH_VERSION=2.15")
    assert other[0] > first[0] and other[1] != first[1]
    compiled.unlink()
    assert state(*command, "-DAXONN_TORCH_VERSION=2.15")[1] == other[1]


def test_each_environment_has_objects_of_its_own() -> None:
    folders = {
        setup_py.build_base(prefix, torch)
        for prefix in ("/a/.venv", "/a/.venv-cuda")
        for torch in ("2.13.0", "2.14.1+cu130")
    }
    assert len(folders) == 4
    assert all(folder.parts[0] == "build" for folder in folders)


def test_ninja_of_the_environment_comes_before_that_of_the_path() -> None:
    first = shutil.which("ninja", path=os.pathsep.join(setup_py.ninja_folders()))
    assert first is not None
    version = subprocess.check_output([first, "--version"], text=True)
    assert importlib.metadata.version("ninja").split(".")[:2] == version.split(".")[:2]


def test_cutlass_is_found(tmp_path: Path) -> None:
    header = tmp_path / "cutlass_library/source/include/cutlass/cutlass.h"
    assert setup_py.find_cutlass(None, [str(tmp_path)]) is None
    header.parent.mkdir(parents=True)
    header.touch()
    include = header.parent.parent
    assert setup_py.find_cutlass(None, ["/nowhere", str(tmp_path)]) == include
    assert setup_py.find_cutlass(str(include.parent), []) == include
    with pytest.raises(SystemExit, match="CUTLASS_HOME=/nowhere has no include/cutlass"):
        setup_py.find_cutlass("/nowhere", [str(tmp_path)])


# --- How many files are compiled at once ----------------------------------------------------------


@pytest.mark.parametrize(
    ("max_jobs", "cores", "gib", "count", "reason"),
    [
        # Without CUDA parts, memory is not limited.
        (None, 64, None, 64, "one per core"),
        ("", 2, None, 2, "one per core"),
        ("8", 2, None, 8, "MAX_JOBS=8"),
        # With CUDA parts, each job gets 6 GiB, even if MAX_JOBS is set.
        (None, 4, 24, 4, "one per core"),
        (None, 4, 23.9, 3, "23.9 GiB of memory are available"),
        ("4", 64, 24, 4, "MAX_JOBS=4"),
        ("5", 64, 24, 4, "24.0 GiB of memory are available"),
        # More memory adds no jobs, and one always remains.
        ("1", 64, 512, 1, "MAX_JOBS=1"),
        ("2", 64, 0.5, 1, "0.5 GiB of memory are available"),
    ],
)
def test_jobs_fit_into_memory(
    max_jobs: str | None,
    cores: int,
    gib: float | None,
    count: int,
    reason: str,
) -> None:
    available = None if gib is None else int(gib * (1 << 30))
    jobs = build_jobs.choose_jobs(max_jobs, cores=cores, available_bytes=available)
    assert jobs.count == count
    assert reason in jobs.reason


@pytest.mark.parametrize("max_jobs", ["0", "-1", "two", "1.5", " 2"])
def test_a_number_of_jobs_that_is_none_is_named(max_jobs: str) -> None:
    with pytest.raises(SystemExit, match=f"MAX_JOBS must be .* or unset, got {max_jobs!r}"):
        build_jobs.choose_jobs(max_jobs, cores=2, available_bytes=None)


def test_available_memory_is_that_of_meminfo_and_of_the_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"

    def found() -> int | None:
        return build_jobs.available_memory(meminfo, cgroup)

    assert found() is None
    meminfo.write_text("MemTotal:       24684200 kB\n")
    assert found() is None
    meminfo.write_text("MemTotal:       24684200 kB\nMemAvailable:   23070356 kB\n")
    assert found() == 23070356 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert found() == 23070356 * 1024
    (cgroup / "memory.max").write_text("8000000000\n")
    (cgroup / "memory.current").write_text("3000000000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 1000000000\n")
    assert found() == 6_000_000_000
    (cgroup / "memory.current").write_text("9500000000\n")
    assert found() == 0
    if Path("/proc/meminfo").exists():
        assert build_jobs.available_memory() > 0


def test_debug_information_is_compiled_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for request, flag in ((None, "-g0"), ("", "-g0"), ("0", "-g0"), ("1", "-g")):
        monkeypatch.delenv("AXONN_DEBUG_INFO", raising=False)
        if request is not None:
            monkeypatch.setenv("AXONN_DEBUG_INFO", request)
        assert [f for f in setup_py.cxx_flags([]) if f.startswith("-g")] == [flag]
    monkeypatch.setenv("AXONN_DEBUG_INFO", "yes")
    with pytest.raises(SystemExit, match="AXONN_DEBUG_INFO must be 0, 1 or unset, got 'yes'"):
        setup_py.cxx_flags([])
