"""Compiles axonn_ext._C, and _cuda, _cuda_sm90 for CUDA. What needs no compiler: pyproject.toml.

AXONN_CUDA            1: build the CUDA parts or fail; 0: never; unset: if a CUDA torch, an nvcc of
                      its major version, NCCL and cuBLAS are found.
CUDA_HOME             the CUDA toolkit; else the wheel nvidia-cuda-nvcc, else the nvcc of the PATH
CUTLASS_HOME          CUTLASS, whose headers _cuda_sm90 needs; else the wheel nvidia-cutlass
TORCH_CUDA_ARCH_LIST  what the kernels are compiled for, as in torch (by default 8.0;9.0+PTX)
MAX_JOBS              how many files are compiled at once (by default one per core)
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent

NO_TORCH = """\
axonn_ext is compiled against the torch that is installed, and the Python that builds it,
{python}, has none. Install one first (pip install torch==2.13.0), then
run: pip install --no-build-isolation . (without that flag pip builds in an environment of its own,
which has no torch either)."""


NO_CUTLASS = (
    "CUTLASS was not found (pip install --no-deps 'nvidia-cutlass>=4.2,<5', or set CUTLASS_HOME)"
)


class BuildError(SystemExit):
    """What keeps the build from starting, and what to do; shown without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nerror: {message}\n")


@dataclass(frozen=True)
class CudaChoice:
    build: bool
    reason: str


@dataclass(frozen=True)
class Toolkit:
    """Where the CUDA compiler, headers and libraries are."""

    home: Path  # has bin/nvcc
    version: str
    wheels: tuple[Path, ...] = ()  # folders of the nvidia wheels, each with include/ or lib/

    def include_dirs(self) -> list[Path]:
        """The toolkit's own first: its headers must be of one version."""
        folders = [folder / "include" for folder in (self.home, *self.wheels)]
        return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]

    def find_header(self, name: str) -> Path | None:
        # The system's packages put nccl.h where every compiler looks.
        folders = [*self.include_dirs(), Path("/usr/include"), Path("/usr/local/include")]
        return next((f / name for f in folders if (f / name).is_file()), None)

    def find_library(self, name: str) -> Path | None:
        """lib<name>.so: of the wheels, since torch loads those, else of the toolkit or system.

        Wheels have only the file with the version, so it is linked by its path. What is loaded is
        the one that torch has loaded before: the linker notes the name in the file alone.
        """
        system = [f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib"]
        folders = [folder / lib for folder in (*self.wheels, self.home) for lib in ("lib64", "lib")]
        for folder in [*folders, *map(Path, system)]:
            for path in sorted(folder.glob(f"lib{name}.so*")):
                if path.is_file():
                    return path
        return None


@dataclass(frozen=True)
class KernelModule:
    """An extension module of CUDA code: all of its files are compiled with the same flags."""

    name: str
    flags: tuple[str, ...]
    sources: list[str] = field(default_factory=list)


def choose_cuda(
    request: str | None,
    *,
    torch_cuda: str | None,
    nvcc: str | None,
    sources: Sequence[str],
    nccl: str | None = "found",
    cublas: str | None = "found",
) -> CudaChoice:
    """Whether to build the CUDA parts, and why.

    request     AXONN_CUDA
    torch_cuda  the CUDA version that torch was built with
    nvcc        the version of the compiler
    sources     the .cu files of this checkout
    nccl        path of nccl.h
    cublas      path of cublasLt.h

    Raises: BuildError if the request is malformed, or demands what cannot be built.
    """
    if request not in (None, "", "0", "1"):
        raise BuildError(f"AXONN_CUDA must be 0, 1 or unset, got {request!r}")
    if request == "0":
        return CudaChoice(False, "AXONN_CUDA=0")

    missing = []
    if not sources:
        missing.append("this version of axonn_ext has no CUDA sources yet (unset AXONN_CUDA)")
    if torch_cuda is None:
        missing.append("torch was built without CUDA (install a CUDA build of torch)")
    if nvcc is None:
        missing.append(
            "nvcc was not found (pip install nvidia-cuda-nvcc, or install the CUDA toolkit and set "
            "CUDA_HOME)"
        )
    elif torch_cuda is not None and nvcc.partition(".")[0] != torch_cuda.partition(".")[0]:
        missing.append(
            f"nvcc is of CUDA {nvcc} but torch of CUDA {torch_cuda} (install an nvcc of the same "
            "major version and set CUDA_HOME)"
        )
    elif nccl is None:
        missing.append("nccl.h was not found (pip install nvidia-nccl-cu13)")
    elif cublas is None:
        missing.append("cublasLt.h was not found (pip install nvidia-cublas)")
    if not missing:
        return CudaChoice(True, "AXONN_CUDA=1" if request == "1" else "torch and nvcc have it")
    if request == "1":
        raise BuildError("AXONN_CUDA=1 demands the CUDA parts, but " + "; ".join(missing))
    return CudaChoice(False, missing[0].partition(" (")[0])


def find_nvcc(cuda_home: str | None, wheels: Iterable[Path] = ()) -> str | None:
    """The path of nvcc: the one of CUDA_HOME, else of the wheel, else of the PATH."""
    for folder in ([Path(cuda_home)] if cuda_home else []) + list(wheels):
        nvcc = folder / "bin" / "nvcc"
        if nvcc.is_file():
            return str(nvcc)
    return shutil.which("nvcc")


def find_wheels(site_packages: Iterable[str]) -> tuple[Path, ...]:
    """The folders of the nvidia wheels that hold headers, libraries or programs."""
    folders = sorted(
        p for root in dict.fromkeys(site_packages) for p in Path(root).glob("nvidia/*")
    )
    return tuple(
        p for p in folders if any((p / part).is_dir() for part in ("include", "lib", "bin"))
    )


def find_cutlass(home: str | None, paths: Iterable[str]) -> Path | None:
    """The folder of CUTLASS's headers: of CUTLASS_HOME, else of the wheel nvidia-cutlass.

    Raises: BuildError if CUTLASS_HOME is no CUTLASS.
    """
    if home:
        folder = Path(home) / "include"
        if not (folder / "cutlass" / "cutlass.h").is_file():
            raise BuildError(f"CUTLASS_HOME={home} has no include/cutlass/cutlass.h")
        return folder
    folders = (Path(path or ".") / "cutlass_library/source/include" for path in paths)
    return next((f for f in folders if (f / "cutlass" / "cutlass.h").is_file()), None)


def parse_nvcc(version: str, dryrun: str) -> tuple[str, Path] | None:
    """Version and home of a compiler, from what `nvcc --version` and `nvcc --dryrun` print.

    nvcc on the PATH may be a script that leads elsewhere, so its own path says nothing.
    """
    release = re.search(r"release (\d+\.\d+)", version)
    here = re.search(r"^#\$ _HERE_=(.*)$", dryrun, re.MULTILINE)
    return (release[1], Path(here[1].strip()).parent) if release and here else None


def find_toolkit(cuda_home: str | None, wheels: tuple[Path, ...]) -> Toolkit | None:
    nvcc = find_nvcc(cuda_home, wheels)
    if nvcc is None:
        return None

    def output(*arguments: str) -> str:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    found = parse_nvcc(output("--version"), output("--dryrun", "none.cu"))
    if found is None:
        raise BuildError(f"{nvcc} does not answer to --version as nvcc does")
    return Toolkit(home=found[1], version=found[0], wheels=wheels)


# --- Architectures --------------------------------------------------------------------------------

DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"


def gencode_flags(arch_list: str | None) -> tuple[str, ...]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST; PTX as well where a version ends in +PTX."""
    flags = []
    for word in re.split(r"[;, ]+", (arch_list or DEFAULT_ARCHITECTURES).strip("; ,")):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if match is None:
            raise BuildError(
                "TORCH_CUDA_ARCH_LIST must list versions such as 8.0 or 9.0+PTX, separated by "
                f"semicolons, got {word!r}"
            )
        number = "".join(match.group(1, 2, 3))
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(dict.fromkeys(flags))


def kernel_modules(sources: Sequence[str], arch_list: str | None) -> list[KernelModule]:
    """The modules that the .cu files go to: _cuda, and _cuda_sm90 for files named *_sm90.cu.

    Those use what only that architecture has, and must not meet the flags of another; from 9.0 on
    such code is for that version alone (sm_90a). Modules whose architecture is not asked for are
    left out.
    """
    flags = gencode_flags(arch_list)
    asked = {match[1] for flag in flags if (match := re.search(r"code=sm_(\d+)", flag))}
    modules = {"": KernelModule("axonn_ext._cuda", flags)}
    for source in sources:
        match = re.search(r"_sm(\d+)\.cu$", source)
        number = match[1] if match else ""
        if number and number not in asked:
            continue
        if number not in modules:
            real = number + ("a" if int(number) >= 90 else "")
            only = (f"-gencode=arch=compute_{real},code=sm_{real}",)
            modules[number] = KernelModule(f"axonn_ext._cuda_sm{number}", only)
        modules[number].sources.append(source)
    return list(modules.values())


# --- Extensions -----------------------------------------------------------------------------------


def find_files(*patterns: str) -> list[str]:
    """The matching files, sorted, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p))


CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits whether or not the CPU has fused multiply-add
    "-Wall",
    "-Wextra",
)
# Without -DNDEBUG CUTLASS's asserts make ptxas wait for each wgmma.
NVCC_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-lineinfo", "-Xcompiler=-fvisibility=hidden")
CUTLASS_FLAGS = ("--expt-relaxed-constexpr",)
# What both modules need of the core; hidden symbols keep the two copies apart.
CUDA_CORE = tuple(
    f"csrc/core/{name}.cpp"
    for name in ("call_log", "call_watch", "launch_config", "philox", "product_variant")
)


def cxx_flags(include_dirs: Iterable[str | Path]) -> list[str]:
    """The flags of C++ files, with the headers of others, which are not ours to warn about.

    ninja does not watch system headers, so torch's version stands in the command line: another
    torch recompiles everything.
    """
    import torch

    system = [word for path in include_dirs for word in ("-isystem", str(path))]
    return [*CXX_FLAGS, *system, f"-DAXONN_TORCH_VERSION={torch.__version__}"]


def cpu_extension() -> Any:
    from torch.utils.cpp_extension import CppExtension

    extension = CppExtension(
        name="axonn_ext._C",
        sources=find_files(
            "csrc/core/*.cpp", "csrc/ops/*.cpp", "csrc/ops/composed/*.cpp", "csrc/ops/cpu/*.cpp"
        ),
        # Without these setuptools takes the module for up to date when only a header changed.
        depends=["setup.py", *find_files("csrc/core/*.h", "csrc/ops/*.h", "csrc/ops/*/*.h")],
    )
    extension.extra_compile_args = cxx_flags(extension.include_dirs)
    extension.include_dirs = [str(ROOT / "csrc")]
    return extension


def cuda_extension(module: KernelModule, toolkit: Toolkit, cutlass: Path | None) -> Any:
    """One module of CUDA code, with the C++ files of csrc/ops/<its name> that bind it.

    An architecture's has those of csrc/core/cuda/<architecture> and CUTLASS.
    """
    from torch.utils.cpp_extension import CppExtension

    folder = module.name.rpartition("._")[2]
    sources = find_files(f"csrc/ops/{folder}/*.cpp")
    if folder == "cuda":
        sources += [*find_files("csrc/core/cuda/*.cpp"), *CUDA_CORE]
        cutlass = None
    else:
        sources += find_files(f"csrc/core/cuda/{folder.removeprefix('cuda_')}/*.cpp")
    extension = CppExtension(
        name=module.name,
        sources=[*sources, *module.sources],
        depends=["setup.py", *find_files("csrc/**/*.h", "csrc/**/*.cuh")],
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


def build_command(report: str, objects: Path) -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class BuildCommand(BuildExtension.with_options(use_ninja=True)):
        """Says what is built, and keeps the objects, so that only what changed is recompiled."""

        def build_extensions(self) -> None:
            print(report, flush=True)
            super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            # A folder for each: modules compile some files alike, but with flags of their own. An
            # editable build would otherwise use, and remove, a new temporary folder; wheels and
            # editable installs share their objects.
            self.build_temp = str(objects / ext.name.rpartition(".")[2])
            super().build_extension(ext)

    return BuildCommand


def main() -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BuildError(NO_TORCH.format(python=sys.executable)) from None

    # A ninja from PyPI lies beside the interpreter, whose folder need not be on the PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    sources = find_files("csrc/core/cuda/*.cu")
    wheels = find_wheels([str(Path(torch.__file__).parent.parent), sysconfig.get_path("purelib")])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    toolkit = find_toolkit(home, wheels)
    choice = choose_cuda(
        os.environ.get("AXONN_CUDA"),
        torch_cuda=torch.version.cuda,
        nvcc=toolkit.version if toolkit else None,
        sources=sources,
        nccl=str(toolkit.find_header("nccl.h") or "") or None if toolkit else None,
        cublas=str(toolkit.find_header("cublasLt.h") or "") or None if toolkit else None,
    )
    report = (
        f"axonn_ext: torch {torch.__version__} (CUDA {torch.version.cuda or 'none'}), "
        f"nvcc {f'{toolkit.version} in {toolkit.home}' if toolkit else 'none'}\n"
        f"axonn_ext: building for CPU{' and CUDA' if choice.build else ', not for CUDA'}: "
        f"{choice.reason}"
    )
    modules: list[KernelModule] = []
    cutlass = None
    if choice.build:
        assert toolkit is not None
        os.environ["CUDA_HOME"] = str(toolkit.home)  # torch reads it when the next is imported
        modules = kernel_modules(sources, arch_list)
        cutlass = find_cutlass(os.environ.get("CUTLASS_HOME"), sys.path)
        if cutlass is None and len(modules) > 1:
            report += f"\naxonn_ext: {modules[1].name} is left out: {NO_CUTLASS}"
            if os.environ.get("AXONN_CUDA") == "1":
                raise BuildError(f"AXONN_CUDA=1 demands the CUDA parts, but {NO_CUTLASS}")
            modules = modules[:1]
        report += "".join(f"\naxonn_ext: {m.name} has {' '.join(m.flags)}" for m in modules)
    # Builds against different torches, which may differ in what they hold, share no folder.
    base = Path("build", f"{sys.implementation.cache_tag}-torch-{torch.__version__}")
    setup(
        ext_modules=[cpu_extension(), *(cuda_extension(m, toolkit, cutlass) for m in modules)],
        cmdclass={"build_ext": build_command(report, ROOT / base / "objects")},
        options={"build": {"build_base": str(base)}},
    )


if __name__ == "__main__":
    main()
