"""Compiles axonn_ext._C and, for CUDA, _cuda and _cuda_sm90. The metadata is in pyproject.toml.

AXONN_CUDA            1: build the CUDA parts or fail; 0: never build them; unset: build them if a
                      CUDA torch, an nvcc of its major version, NCCL and cuBLAS are found
AXONN_CUDA_REASON     for the report: why AXONN_CUDA=0 is set, if a program set it
CUDA_HOME             the CUDA toolkit (default: the wheels of cuda-toolkit, else the nvcc on PATH)
CUTLASS_HOME          CUTLASS, whose headers _cuda_sm90 needs (default: the wheel nvidia-cutlass)
TORCH_CUDA_ARCH_LIST  architectures to compile the kernels for, as in torch (default: 8.0;9.0+PTX)
MAX_JOBS              maximum number of files to compile at once (default: one per core, or fewer
                      for CUDA parts if less than 6 GiB of memory is available for each)
AXONN_DEBUG_INFO      1: compile C++ with debug information; _C then takes 100 MB instead of 3

The build prints what it builds, and what it leaves out and why (pip shows this with -v). Later,
`axonn-ext doctor` shows the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from architectures import KernelModule, choose_modules  # noqa: E402
from build_jobs import Jobs, available_memory, choose_jobs  # noqa: E402
from find_cuda import (  # noqa: E402
    BuildError,
    CudaChoice,
    Toolkit,
    choose_cuda,
    find_cutlass,
    find_toolkit,
    find_wheels,
    what_cutlass_lacks,
)
from precompile import precompile  # noqa: E402

NO_TORCH = """\
axonn_ext is compiled against the torch that is installed, and the Python that builds it,
{python}, has none. Install one first (pip install torch==2.13.0), then
run: pip install --no-build-isolation . (without that flag pip builds in an environment of its own,
which has no torch either)."""


# --- Extensions -----------------------------------------------------------------------------------


def find_files(*patterns: str) -> list[str]:
    """The matching files, sorted, as the relative paths that setuptools expects."""
    return sorted(str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p))


CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # bitwise the same results with and without fused multiply-add
    "-fno-math-errno",  # without this flag, loops with square roots are not vectorized
    "-Wall",
    "-Wextra",
)
# Without -DNDEBUG, CUTLASS's asserts make ptxas wait for each wgmma.
NVCC_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-lineinfo", "-Xcompiler=-fvisibility=hidden")
CUTLASS_FLAGS = ("--expt-relaxed-constexpr",)
# Folders of csrc/ops whose files belong to the CUDA module of the same name, not to _C.
CUDA_FOLDERS = ("cuda", "cuda_sm90")


def debug_info_flag() -> str:
    """The flag that turns debug information on or off; Python's own flags turn it on.

    With debug information, _C takes 100 MB instead of 3, and compiling it takes a fifth longer.

    Raises: BuildError if AXONN_DEBUG_INFO is malformed.
    """
    request = os.environ.get("AXONN_DEBUG_INFO")
    if request not in (None, "", "0", "1"):
        raise BuildError(f"AXONN_DEBUG_INFO must be 0, 1 or unset, got {request!r}")
    return "-g" if request == "1" else "-g0"


def cxx_flags(include_dirs: Iterable[str | Path]) -> list[str]:
    """The flags of C++ files. Third-party headers are system headers, which cause no warnings.

    ninja does not track system headers, so the command line contains torch's version: a different
    torch then recompiles everything.
    """
    import torch

    system = [word for path in include_dirs for word in ("-isystem", str(path))]
    return [*CXX_FLAGS, debug_info_flag(), *system, f"-DAXONN_TORCH_VERSION={torch.__version__}"]


def files_of(folder: str, pattern: str) -> list[str]:
    """The matching files of csrc/core or csrc/ops, without those that only CUDA modules use."""
    cuda = ("csrc/core/cuda/", *(f"csrc/ops/{name}/" for name in CUDA_FOLDERS))
    return [name for name in find_files(f"csrc/{folder}/{pattern}") if not name.startswith(cuda)]


def cpu_extension() -> Any:
    from torch.utils.cpp_extension import CppExtension

    extension = CppExtension(
        name="axonn_ext._C",
        sources=files_of("ops", "**/*.cpp"),
    )
    extension.extra_compile_args = cxx_flags(extension.include_dirs)
    extension.include_dirs = [str(ROOT / "csrc")]
    return extension


def cuda_extension(module: KernelModule, toolkit: Toolkit, cutlass: Path | None) -> Any:
    """One module of CUDA code, with its bindings, the C++ files of csrc/ops/<module>.

    A module for one architecture also has the files of csrc/core/cuda/<architecture>, and CUTLASS.
    """
    from torch.utils.cpp_extension import CppExtension

    folder = module.name.rpartition("._")[2]
    sources = find_files(f"csrc/ops/{folder}/*.cpp")
    if folder == "cuda":
        sources += find_files("csrc/core/cuda/nccl/*.cpp", "csrc/core/cuda/fused/*.cpp")
        cutlass = None
    else:
        sources += find_files(f"csrc/core/cuda/{folder.removeprefix('cuda_')}/*.cpp")
    extension = CppExtension(
        name=module.name,
        sources=[*sources, *module.sources],
        libraries=["c10_cuda", "torch_cuda"],
    )
    includes = [*extension.include_dirs, *toolkit.include_dirs()]
    architectures = ",".join(re.findall(r",code=(\w+)", " ".join(module.flags)))
    system = [*toolkit.include_dirs()[1:], *([cutlass] if cutlass else [])]
    nvcc = [word for path in system for word in ("-isystem", str(path))]
    extension.extra_compile_args = {
        "cxx": [
            *cxx_flags(includes),
            f"-DAXONN_CUDA_ARCHITECTURES={architectures}",
            f"-DAXONN_NVCC_VERSION={toolkit.version}",
        ],
        "nvcc": [*NVCC_FLAGS, *(CUTLASS_FLAGS if cutlass else ()), *nvcc, *module.flags],
    }
    extension.include_dirs = [str(ROOT / "csrc")]
    for name in ("cudart", "nccl", "cublasLt") if folder == "cuda" else ("cudart", "nccl"):
        library = toolkit.find_library(name)
        if library is None:
            raise BuildError(f"lib{name}.so was not found in the nvidia wheels or {toolkit.home}")
        extension.extra_link_args.append(str(library))
    return extension


def build_base(prefix: str, torch: str) -> Path:
    """The build folder of an environment.

    The compiler's command lines contain paths of the environment. If environments shared a folder,
    each would recompile what another had compiled.
    """
    environment = hashlib.sha256(prefix.encode()).hexdigest()[:8]
    return Path("build", f"{sys.implementation.cache_tag}-torch-{torch}-{environment}")


def ninja_folders() -> list[str]:
    """Folders that may hold this environment's ninja, to put at the front of PATH.

    A ninja from elsewhere may use another version of the build log's format. It then discards the
    log and recompiles everything.
    """
    folders = [str(Path(sys.executable).parent)]
    try:
        files = importlib.metadata.files("ninja") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # An environment that inherits the package from another Python finds ninja in that one's folder.
    folders += [str(Path(file.locate()).resolve().parent) for file in files if file.name == "ninja"]
    return folders


LEFT_OUT = """\
// Written by setup.py: the parts that this build left out, and why.
#include "ops/left_out.h"

std::map<std::string, std::string> axonn::ops::left_out() {{ return {{{rows}}}; }}
"""


def write_left_out(folder: Path, left_out: Mapping[str, str]) -> str:
    """Writes, if it has changed, the source file of _C that lists the parts left out."""
    path = folder / "left_out.cpp"
    rows = ", ".join(f"{{{json.dumps(name)}, {json.dumps(why)}}}" for name, why in left_out.items())
    text = LEFT_OUT.format(rows=rows)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path)


def remove_modules(folder: Path, *, keep: Sequence[str]) -> None:
    """Removes compiled modules of an earlier build, which would be packaged or loaded."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for path in folder.glob(f"_*{suffix}"):
        if path.name.removesuffix(suffix) not in keep:
            path.unlink()


def build_command(report: str, base: Path, left_out: Mapping[str, str]) -> Any:
    import torch
    from torch.utils.cpp_extension import (
        BuildExtension,
        check_compiler_is_gcc,
        get_cxx_compiler,
    )

    objects = ROOT / base / "objects"

    class BuildCommand(BuildExtension.with_options(use_ninja=True)):
        """Prints what it builds, and keeps the objects, so that only changed files recompile."""

        def build_extensions(self) -> None:
            print(report, flush=True)
            # Added only here: an sdist, which lists the sources without building, must not have it.
            self.extensions[0].sources.append(write_left_out(base, left_out))
            self.parallel = None  # the other modules reuse what _C's build has compiled
            names = [ext.name.rpartition(".")[2] for ext in self.extensions]
            remove_modules(Path(self.build_lib, "axonn_ext"), keep=names)
            super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            if ext is self.extensions[0]:  # _C, which is built first
                self.core = self.objects_of_core(ext.include_dirs)
                self.headers = self.flags_of_headers(ext)
            ext.extra_objects = self.core
            flags = ext.extra_compile_args
            (flags["cxx"] if isinstance(flags, dict) else flags).extend(self.headers)
            # One folder per module, shared by wheels and editable installs. An editable build would
            # otherwise use a new temporary folder, and remove it.
            self.build_temp = str(objects / ext.name.rpartition(".")[2])
            super().build_extension(ext)

        def objects_of_core(self, include_dirs: list[str]) -> list[str]:
            """Compiles csrc/core, which needs no torch, once for all modules.

            Its symbols are hidden, so that each module uses its own copy.
            """
            return self.compiler.compile(
                files_of("core", "**/*.cpp"), output_dir=str(objects / "core"),
                include_dirs=include_dirs, extra_postargs=[*CXX_FLAGS, debug_info_flag()],
            )  # fmt: skip

        def flags_of_headers(self, ext: Any) -> list[str]:
            """Returns the flags that make g++ use the precompiled headers of torch."""
            if not check_compiler_is_gcc(get_cxx_compiler()) or torch.version.hip is not None:
                return []
            includes = [f"-I{path}" for path in (*ext.include_dirs, *self.compiler.include_dirs)]
            # This macro differs between modules; with it, only one could use the headers.
            flags = [*self.compiler.compiler_so[1:], *ext.extra_compile_args]
            flags = [flag for flag in flags if not flag.startswith("-DTORCH_EXTENSION_NAME=")]
            return precompile(ROOT / base / "headers", [get_cxx_compiler(), *includes, *flags])

        def copy_extensions_to_source(self) -> None:
            """Removes the modules of an earlier editable build, which must not be loaded."""
            remove_modules(ROOT / "axonn_ext", keep=())
            super().copy_extensions_to_source()

    return BuildCommand


def report_of(
    toolkit: Toolkit | None,
    choice: CudaChoice,
    modules: Sequence[KernelModule],
    left_out: Mapping[str, str],
    jobs: Jobs,
) -> str:
    """The report: what is built and with which tools, what is left out, and how many jobs run."""
    import torch

    nvcc = f"{toolkit.version} in {toolkit.home}" if toolkit else "none"
    runtime = f"CUDA {torch.version.cuda or 'none'}"
    if torch.version.hip is not None:
        runtime = f"ROCm {torch.version.hip}"
    lines = [
        f"torch {torch.__version__} ({runtime}), nvcc {nvcc}",
        f"building for CPU and CUDA: {choice.reason}" if choice.build else "building for CPU",
        *(f"{module.name} has {' '.join(module.flags)}" for module in modules),
        *(f"axonn_ext.{name} is left out: {why}" for name, why in left_out.items()),
        f"compiling {jobs.count} at a time: {jobs.reason}",
    ]
    return "\n".join(f"axonn_ext: {line}" for line in lines)


def main() -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BuildError(NO_TORCH.format(python=sys.executable)) from None

    os.environ["PATH"] = os.pathsep.join([*ninja_folders(), os.environ["PATH"]])

    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    sources = find_files("csrc/core/cuda/**/*.cu")
    wheels = find_wheels([str(Path(torch.__file__).parent.parent), sysconfig.get_path("purelib")])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    toolkit = find_toolkit(home, wheels)
    choice = choose_cuda(
        os.environ.get("AXONN_CUDA"),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        nvcc=toolkit.version if toolkit else None,
        sources=sources,
        nccl=str(toolkit.find_header("nccl.h") or "") or None if toolkit else None,
        cublas=str(toolkit.find_header("cublasLt.h") or "") or None if toolkit else None,
        because=os.environ.get("AXONN_CUDA_REASON"),
    )
    modules: list[KernelModule] = []
    left_out = {"_cuda": choice.reason}
    cutlass = None
    if choice.build:
        assert toolkit is not None
        os.environ["CUDA_HOME"] = str(toolkit.home)  # read on importing torch's cpp_extension
        if shutil.which("ccache"):  # C++ uses it if PATH has ccache's compilers first
            os.environ.setdefault("PYTORCH_NVCC", f"ccache {toolkit.home / 'bin' / 'nvcc'}")
        cutlass = find_cutlass(os.environ.get("CUTLASS_HOME"), sys.path)
        demanded = os.environ.get("AXONN_CUDA") == "1"
        lacking = what_cutlass_lacks(cutlass, toolkit)
        modules, left_out = choose_modules(sources, arch_list, lacking=lacking, demanded=demanded)
    jobs = choose_jobs(
        os.environ.get("MAX_JOBS"),
        cores=len(os.sched_getaffinity(0)),
        available_bytes=available_memory() if choice.build else None,
    )
    os.environ["MAX_JOBS"] = str(jobs.count)  # torch's BuildExtension reads it
    base = build_base(sys.prefix, torch.__version__)
    for copy in base.glob("lib*/axonn_ext/**/*"):  # or deleted files would be installed
        if copy.is_file() and copy.suffix != ".so":
            copy.unlink()
    setup(
        ext_modules=[cpu_extension(), *(cuda_extension(m, toolkit, cutlass) for m in modules)],
        cmdclass={
            "build_ext": build_command(
                report_of(toolkit, choice, modules, left_out, jobs), base, left_out
            )
        },
        options={"build": {"build_base": str(base)}},
    )


if __name__ == "__main__":
    main()
