"""Finds CUDA on this machine, and decides whether setup.py builds the CUDA parts."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_CUTLASS = (
    "CUTLASS was not found (pip install --no-deps 'nvidia-cutlass>=4.2,<5', or set CUTLASS_HOME)"
)
NO_CCCL = "CCCL was not found (pip install 'cuda-toolkit[cccl]')"
# Toolkits include CCCL, since CUDA 13 in its own folder; of the wheels, only its own has it.
CCCL_HEADERS = ("cccl/cuda/std/cstdint", "cuda/std/cstdint")
HEADERS = ("nccl.h", "cublasLt.h", *CCCL_HEADERS)  # they decide what is built


class BuildError(SystemExit):
    """The build cannot start; the message says why and what to do. Shown without a traceback."""

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
        """The include folders, the toolkit's own first, so that its headers have one version."""
        folders = [folder / "include" for folder in (self.home, *self.wheels)]
        return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]

    def find_header(self, name: str) -> Path | None:
        # System packages put nccl.h into the compiler's default folders.
        folders = [*self.include_dirs(), Path("/usr/include"), Path("/usr/local/include")]
        return next((f / name for f in folders if (f / name).is_file()), None)

    def find_library(self, name: str) -> Path | None:
        """lib<name>.so from the wheels, since torch loads those, else from the toolkit or system.

        Wheels have only the file with the version in its name, so it is linked by its path. The
        linker records only the library's soname, so the copy that torch has already loaded is used.
        """
        system = [f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib"]
        folders = [folder / lib for folder in (*self.wheels, self.home) for lib in ("lib64", "lib")]
        for folder in [*folders, *map(Path, system)]:
            for path in sorted(folder.glob(f"lib{name}.so*")):
                if path.is_file():
                    return path
        return None


def choose_cuda(
    request: str | None,
    *,
    torch_cuda: str | None,
    nvcc: str | None,
    sources: Sequence[str],
    nccl: str | None = "found",
    cublas: str | None = "found",
    because: str | None = None,
    torch_hip: str | None = None,
) -> CudaChoice:
    """Whether to build the CUDA parts, and why.

    request     AXONN_CUDA
    torch_cuda  the CUDA version that torch was built with
    nvcc        the version of the compiler
    sources     the .cu files of this checkout
    nccl        path of nccl.h
    cublas      path of cublasLt.h
    because     AXONN_CUDA_REASON
    torch_hip   the HIP version that torch was built with; None: it was not built for AMD's GPUs

    Raises: BuildError if the request is malformed, or demands CUDA parts that cannot be built.
    """
    if request not in (None, "", "0", "1"):
        raise BuildError(f"AXONN_CUDA must be 0, 1 or unset, got {request!r}")
    missing = []
    if not sources:
        missing.append("this version of axonn_ext has no CUDA sources yet (unset AXONN_CUDA)")
    if torch_hip is not None:
        missing.append(f"torch is built for ROCm {torch_hip} (install a CUDA build of torch)")
    elif torch_cuda is None:
        missing.append("torch was built without CUDA (install a CUDA build of torch)")
    if nvcc is None:
        missing.append(
            "nvcc was not found (pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME to a "
            "CUDA toolkit)"
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
    if not missing and request == "0":
        return CudaChoice(False, because or "AXONN_CUDA=0")
    if not missing:
        return CudaChoice(True, "AXONN_CUDA=1" if request == "1" else "torch and nvcc have it")
    if request == "1":
        raise BuildError("AXONN_CUDA=1 demands the CUDA parts, but " + "; ".join(missing))
    return CudaChoice(False, missing[0])


def find_nvcc(cuda_home: str | None, wheels: Iterable[Path] = ()) -> str | None:
    """The path of nvcc: from CUDA_HOME, else from the wheels, else from PATH."""
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
    """The folder of CUTLASS's headers: from CUTLASS_HOME, else from the wheel nvidia-cutlass.

    Raises: BuildError if CUTLASS_HOME does not contain CUTLASS.
    """
    if home:
        folder = Path(home) / "include"
        if not (folder / "cutlass" / "cutlass.h").is_file():
            raise BuildError(f"CUTLASS_HOME={home} has no include/cutlass/cutlass.h")
        return folder
    folders = (Path(path or ".") / "cutlass_library/source/include" for path in paths)
    return next((f for f in folders if (f / "cutlass" / "cutlass.h").is_file()), None)


def what_cutlass_lacks(folder: Path | None, toolkit: Toolkit) -> str | None:
    """Why the code that needs CUTLASS cannot be compiled; None if it can."""
    if folder is None:
        return NO_CUTLASS
    return None if any(map(toolkit.find_header, CCCL_HEADERS)) else NO_CCCL


def parse_nvcc(version: str, dryrun: str) -> tuple[str, Path] | None:
    """The compiler's version and home, from the output of `nvcc --version` and `nvcc --dryrun`.

    The nvcc on PATH may be a script that calls another one, so its own path says nothing.
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
