"""Compiles axonn_ext._C. Everything that needs no compiler is in pyproject.toml.

AXONN_CUDA   1: build the CUDA parts or fail; 0: never; unset: if a CUDA torch and nvcc are found.
MAX_JOBS     how many files are compiled at once (by default one per core).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent

NO_TORCH = """\
axonn_ext is compiled against the torch that is installed, and the Python that builds it,
{python}, has none. Install one first (pip install torch==2.13.0), then
run: pip install --no-build-isolation . (without that flag pip builds in an environment of its own,
which has no torch either)."""


class BuildError(SystemExit):
    """What keeps the build from starting, and what to do; shown without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nerror: {message}\n")


@dataclass(frozen=True)
class CudaChoice:
    build: bool
    reason: str


def choose_cuda(
    request: str | None, *, torch_cuda: str | None, nvcc: str | None, sources: Sequence[str]
) -> CudaChoice:
    """Whether to build the CUDA parts, and why.

    request     AXONN_CUDA
    torch_cuda  the CUDA version that torch was built with
    nvcc        path of the compiler
    sources     the .cu files of this checkout

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
        missing.append("nvcc was not found (install the CUDA toolkit and set CUDA_HOME)")
    if not missing:
        return CudaChoice(True, "AXONN_CUDA=1" if request == "1" else "torch and nvcc have it")
    if request == "1":
        raise BuildError("AXONN_CUDA=1 demands the CUDA parts, but " + "; ".join(missing))
    return CudaChoice(False, missing[0].partition(" (")[0])


def find_nvcc(cuda_home: str | None) -> str | None:
    """The path of nvcc: the one of CUDA_HOME before the one of PATH."""
    if cuda_home is not None:
        nvcc = Path(cuda_home, "bin", "nvcc")
        if nvcc.is_file():
            return str(nvcc)
    return shutil.which("nvcc")


def find_files(*patterns: str) -> list[str]:
    """The matching files, sorted, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p))


def cpu_extension() -> Any:
    import torch
    from torch.utils.cpp_extension import CppExtension

    extension = CppExtension(
        name="axonn_ext._C",
        sources=find_files("csrc/core/*.cpp", "csrc/ops/*.cpp", "csrc/ops/cpu/*.cpp"),
        # Without these setuptools takes the module for up to date when only a header changed.
        depends=["setup.py", *find_files("csrc/core/*.h", "csrc/ops/*.h", "csrc/ops/cpu/*.h")],
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-fvisibility=hidden",
            "-ffp-contract=off",  # the same bits whether or not the CPU has fused multiply-add
            "-Wall",
            "-Wextra",
        ],
    )
    # Torch's headers are not ours to warn about. ninja does not watch system headers, so the
    # version stands in the command line: another torch recompiles everything.
    for path in extension.include_dirs:
        extension.extra_compile_args += ["-isystem", path]
    extension.extra_compile_args.append(f"-DAXONN_TORCH_VERSION={torch.__version__}")
    extension.include_dirs = [str(ROOT / "csrc")]
    return extension


def build_command(report: str) -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class BuildCommand(BuildExtension.with_options(use_ninja=True)):
        """Says what is built, and keeps the objects, so that only what changed is recompiled."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # An editable build would otherwise use, and remove, a new temporary folder. Wheels and
            # editable installs of one Python share their objects.
            self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}")

        def build_extensions(self) -> None:
            print(report, flush=True)
            super().build_extensions()

    return BuildCommand


def main() -> None:
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BuildError(NO_TORCH.format(python=sys.executable)) from None

    # A ninja from PyPI lies beside the interpreter, whose folder need not be on the PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    nvcc = find_nvcc(CUDA_HOME)
    choice = choose_cuda(
        os.environ.get("AXONN_CUDA"),
        torch_cuda=torch.version.cuda,
        nvcc=nvcc,
        sources=find_files("csrc/**/*.cu"),
    )
    report = (
        f"axonn_ext: torch {torch.__version__} (CUDA {torch.version.cuda or 'none'}), "
        f"nvcc {nvcc or 'none'}\n"
        f"axonn_ext: building for CPU{' and CUDA' if choice.build else ', not for CUDA'}: "
        f"{choice.reason}"
    )
    setup(
        ext_modules=[cpu_extension()],
        cmdclass={"build_ext": build_command(report)},
    )


if __name__ == "__main__":
    main()
