"""Builds all CUDA code in .venv-cuda and checks what can be checked without a GPU or a driver.

    python3 tools/cuda_check.py              make cuda-check
    python3 tools/cuda_check.py --optional   in CI: what cannot be set up there is not run

Checked: the modules import and register their ops; each architecture asked for has machine code; no
kernel uses local memory (no spills) or more registers than its launch bounds promise; `axonn-ext
doctor` runs. Whether the kernels compute the right thing only a GPU can tell.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv-cuda" / "bin"
ARCHITECTURES = ("sm_80", "sm_90")
# 65,536 registers / (4 blocks of 256 threads): what every kernel so far leaves room for.
MAX_REGISTERS = 64

IMPORT = """
import pathlib, sys
import torch
from axonn_ext import _cuda
assert not torch.cuda.is_initialized(), "importing touched the device"
for op in ("fill_random_",):
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"axonn::{op}", "CUDA")
    assert has, f"axonn::{op} has no CUDA kernel"
print(pathlib.Path(_cuda.__file__).parent)
"""


class CheckError(Exception):
    """A check that did not pass, and what was found."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel's use of resources, as cuobjdump prints it."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    local_bytes: int


def parse_resource_usage(text: str) -> list[Kernel]:
    """The kernels of `cuobjdump --dump-resource-usage`."""
    kernels = []
    architecture = name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", line):
            kernels.append(Kernel(name, architecture, *(int(number) for number in match.groups())))
    return kernels


def kernel_problems(kernels: list[Kernel]) -> list[str]:
    """What is wrong with them, a line each."""
    problems = []
    for kernel in kernels:
        where = f"{kernel.name} for {kernel.architecture}"
        if kernel.local_bytes or kernel.stack_bytes:
            problems.append(
                f"{where} uses {kernel.local_bytes} bytes of local memory and a stack of "
                f"{kernel.stack_bytes}: it spills, or indexes an array at run time"
            )
        if kernel.registers > MAX_REGISTERS:
            problems.append(f"{where} uses {kernel.registers} registers, more than {MAX_REGISTERS}")
    compiled = {kernel.architecture for kernel in kernels}
    problems += [f"there is no code for {arch}" for arch in ARCHITECTURES if arch not in compiled]
    return problems


def output(*command: str | Path) -> str:
    """What a program prints. It runs outside the checkout, so that the installed package counts."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=tempfile.gettempdir(),
        env={name: text for name, text in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise CheckError(f"{command[0]} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def find_cuobjdump() -> Path:
    """The one that comes with triton, which comes with torch."""
    found = sorted(BIN.parent.glob("lib/python3*/site-packages/triton/**/bin/cuobjdump"))
    if not found:
        raise CheckError("triton, which brings cuobjdump, is not installed in .venv-cuda")
    return found[0]


def check_import() -> list[Path]:
    """The compiled modules of CUDA code."""
    folder = Path(output(BIN / "python", "-c", IMPORT).split()[-1])
    modules = sorted(folder.glob("_cuda*.so"))
    print(f"cuda-check: {', '.join(path.name for path in modules)} import without a driver")
    return modules


def check_kernels(module: Path) -> None:
    kernels = parse_resource_usage(output(find_cuobjdump(), "--dump-resource-usage", module))
    if not kernels:
        raise CheckError(f"{module.name} holds no kernels")
    if problems := kernel_problems(kernels):
        raise CheckError("\n".join([f"{module.name}:", *problems]))
    for architecture in sorted({kernel.architecture for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.architecture == architecture]
        print(
            f"cuda-check: {module.name}, {architecture}: {len(mine)} kernels, no local memory, at "
            f"most {max(kernel.registers for kernel in mine)} registers"
        )


def check_doctor() -> None:
    print(output(BIN / "axonn-ext", "doctor"), end="")


def bootstrap(step: str) -> bool:
    program = [sys.executable, str(ROOT / "tools" / "bootstrap.py"), step]
    return subprocess.run(program, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optional", action="store_true", help="no environment is no failure")
    optional = parser.parse_args().optional
    start = time.monotonic()
    if not bootstrap("cuda-environment"):
        print("cuda-check: not run: .venv-cuda could not be made; the reason is above")
        return 0 if optional else 1
    try:
        if not bootstrap("cuda"):
            raise CheckError("the CUDA parts do not compile; the errors are above")
        for module in check_import():
            check_kernels(module)
        check_doctor()
    except CheckError as error:
        print(f"cuda-check: error: {error}")
        return 1
    print(f"cuda-check: passed in {time.monotonic() - start:.0f} s; nothing was run on a GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
