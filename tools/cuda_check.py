"""Builds all CUDA code as docs/install.md says, and checks what needs no GPU and no driver.

It runs the commands of the section "With CUDA" unchanged, in .venv-cuda, which starts empty and is
kept while the commands stay the same. The last command builds; it runs every time and recompiles
what changed.

It checks that
- the modules import and register their ops;
- each architecture asked for has machine code;
- no kernel uses local memory (no spills) or more registers than its launch bounds promise;
- the handshake kernels fit on an SM together with a GEMM;
- the GEMMs for sm_90, and the kernels that store sums at all ranks, use the instructions that they
  are written for;
- `axonn-ext doctor` runs.
Only a GPU can tell whether the kernels compute correct results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bootstrap import (
    BUILD_PROGRESS,
    ROOT,
    SetupError,
    digest,
    exclusive,
    install_tools,
    run_logged,
    say,
)

PAGE = "docs/install.md"
VENV = ROOT / ".venv-cuda"
BIN = VENV / "bin"
COMPLETE = VENV / "complete"  # exists if all but the last command completed; holds their digest
# Variables that would make the commands use something other than what they install.
LEFT_TO_THE_COMMANDS = (
    *("CUDA_HOME", "CUDA_PATH", "CUTLASS_HOME", "AXONN_CUDA", "TORCH_CUDA_ARCH_LIST"),
    *("PYTHONPATH", "PYTHONHOME"),
)


@dataclass(frozen=True)
class Module:
    """Requirements for the kernels of an extension module."""

    architectures: tuple[str, ...]
    max_registers: int


MODULES = {
    # 65,536 registers / (4 blocks of 256 threads): every kernel must let 4 blocks fit on an SM.
    "_cuda": Module(("sm_80", "sm_90"), 64),
    # 65,536 / 384 threads, in steps of 8: one block per SM. Its math warps take over registers of
    # its producer warps at run time.
    "_cuda_sm90": Module(("sm_90a",), 168),
}

# A GEMM of 384 threads with 168 registers each leaves 1,024 of an SM's 65,536: one warp of 32
# registers per thread. So a handshake kernel, which is one warp, fits next to it.
HANDSHAKE = re.compile(r"handshake_cu.*\d(begin|raise|await|await_own|end)_kernelE")
NUM_HANDSHAKE_KERNELS = 5
MAX_HANDSHAKE_REGISTERS = 32

# Opcodes that each GEMM must have, and their purpose.
GEMM_OPCODES = {
    r"HGMMA\.64x(128|256)x16\.F32": "wgmma, accumulated in fp32",
    r"UTMALDG\.\w+\.MULTICAST": "bulk loads shared by a cluster",
    r"UTMASTG": "bulk stores",
    r"LDG?\.E\.STRONG\.SYS": "the acquire of flags that peers write",
    r"FENCE\.VIEW\.ASYNC\.G": "the fence between a flag and the bulk copies of what it announces",
}
# Opcodes that GEMMs that send their result to peers must have in addition.
DEPARTURE_OPCODES = {
    r"ATOMG\.E\.ADD\.STRONG\.GPU": "the count of a chunk's tiles",
    r"STG?\.E\.STRONG\.SYS": "the release of a flag at a peer",
}
# Stores of a kernel that adds up rows for all ranks, in its plain form (Lb0E) and its multicast
# form (Lb1E), a template argument at the end of its name. ptxas turns multimem.st into a store of
# system scope.
SUM_OPCODES = {
    "Lb0E": (r"STG\.E\.128 ", "stores of 16 bytes"),
    "Lb1E": (r"STG\.E\.128\.STRONG\.SYS", "multicast stores of 16 bytes"),
}
# Loads of a kernel that lets the switch compute the sums, by dtype.
SWITCH_SUM_OPCODES = {
    "nv_bfloat16": (r"LDGMC\.E\.F32ADD\.BF16x8", "sums of all ranks, added in fp32"),
    "6__half": (r"LDGMC\.E\.F32ADD\.F16x8", "sums of all ranks, added in fp32"),
}

IMPORT = """
import pathlib, sys
import torch
from axonn_ext import _C, _cuda, _cuda_sm90
assert _C.has_fused_on_cuda(), "the fused ops of _cuda are not what _C calls"
assert not torch.cuda.is_initialized(), "importing touched the device"
why = torch.ops.axonn._why_no_fused_here(torch.device("cpu"), torch.bfloat16, 2, False)
assert why == "it is no CUDA device", f"_C asks _cuda in vain what it can fuse: {why}"
for op in ("fill_random_", "_cross_entropy_scan", "_cross_entropy_gradient", "_reduce_slots"):
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"axonn::{op}", "CUDA")
    assert has, f"axonn::{op} has no CUDA kernel"
built = {(i["block"], i["cluster"], i["num_stages"]) for i in _cuda_sm90.instances()}
wanted = set(_cuda.gemm_candidates_sm90())
assert built == wanted, f"GEMMs are built for {built}, but chosen from {wanted}"
print(pathlib.Path(_cuda.__file__).parent)
"""


class CheckError(Exception):
    """A check failed; the message says what was found."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel's use of resources, as cuobjdump prints it."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    local_bytes: int


def parse_resource_usage(text: str) -> list[Kernel]:
    """The kernels in the output of `cuobjdump --dump-resource-usage`."""
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


def kernel_problems(kernels: list[Kernel], module: Module) -> list[str]:
    """The kernels' violations of the module's requirements, one line each."""
    problems = []
    for kernel in kernels:
        where = f"{kernel.name} for {kernel.architecture}"
        if kernel.local_bytes or kernel.stack_bytes:
            problems.append(
                f"{where} uses {kernel.local_bytes} bytes of local memory and a stack of "
                f"{kernel.stack_bytes}: it spills, or indexes an array at run time"
            )
        if kernel.registers > module.max_registers:
            problems.append(
                f"{where} uses {kernel.registers} registers, more than {module.max_registers}"
            )
        if HANDSHAKE.search(kernel.name) and kernel.registers > MAX_HANDSHAKE_REGISTERS:
            problems.append(
                f"{where} uses {kernel.registers} registers, more than {MAX_HANDSHAKE_REGISTERS}: "
                "it does not fit on an SM next to a GEMM"
            )
    compiled = {kernel.architecture for kernel in kernels}
    problems += [
        f"there is no code for {arch}" for arch in module.architectures if arch not in compiled
    ]
    return problems


def handshake_problems(kernels: list[Kernel], module: Module) -> list[str]:
    """The architectures that lack handshake kernels, one line each."""
    problems = []
    for arch in module.architectures:
        names = {k.name for k in kernels if k.architecture == arch and HANDSHAKE.search(k.name)}
        if len(names) != NUM_HANDSHAKE_KERNELS:
            problems.append(
                f"{len(names)} kernels of the handshake for {arch}, not {NUM_HANDSHAKE_KERNELS}"
            )
    return problems


def gemm_problems(name: str, sass: str) -> list[str]:
    """Problems in the machine code of a GEMM for sm_90, one line each."""
    opcodes = GEMM_OPCODES | (DEPARTURE_OPCODES if "DepartureEpilogue" in name else {})
    problems = [
        f"{name} has no {opcode}: {what}"
        for opcode, what in opcodes.items()
        if not re.search(opcode, sass)
    ]
    # ptxas waits for each wgmma if it cannot prove that its registers stay untouched (C7510).
    multiplies, waits = (len(re.findall(word, sass)) for word in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    if multiplies and 2 * waits > multiplies:
        problems.append(f"{name} waits {waits} times for {multiplies} wgmma: they are serialised")
    return problems


def sum_problems(sums: dict[str, str]) -> list[str]:
    """Problems in the machine code of the kernels that store sums at all ranks, one line each."""
    problems = []
    for form, (opcode, what) in SUM_OPCODES.items():
        mine = {name: sass for name, sass in sums.items() if form in name}
        if len(mine) != 2:
            problems.append(f"{len(mine)} sums of the form {form}, not one for each of 2 dtypes")
        problems += [
            f"{name} has no {opcode}: {what}"
            for name, sass in mine.items()
            if not re.search(opcode, sass)
        ]
    return problems


def switch_sum_problems(sums: dict[str, str]) -> list[str]:
    """Problems in the machine code of the kernels whose sums the switch computes, one line each."""
    problems = []
    for dtype, (load, what) in SWITCH_SUM_OPCODES.items():
        mine = {name: sass for name, sass in sums.items() if dtype in name}
        if len(mine) != 1:
            problems.append(f"{len(mine)} sums in the switch of the dtype {dtype}, not one")
        for opcode, why in ((load, what), SUM_OPCODES["Lb1E"]):
            problems += [
                f"{name} has no {opcode}: {why}"
                for name, sass in mine.items()
                if not re.search(opcode, sass)
            ]
    return problems


def parse_sass(text: str) -> dict[str, str]:
    """The machine code of each function in the output of `cuobjdump --dump-sass`."""
    parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# --- The commands of docs/install.md --------------------------------------------------------------


def install_commands(text: str) -> list[str]:
    """The commands of the section "With CUDA": its lines that are indented as code.

    Raises: CheckError if there is no such section, or no command in it.
    """
    section = re.search(r"^## With CUDA\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^    (\S.*)$", section[1], re.MULTILINE) if section else []
    if not commands:
        raise CheckError(f"{PAGE} has no commands in a section '## With CUDA'")
    return commands


def run_commands(commands: list[str]) -> None:
    """Runs the commands in .venv-cuda, recreating it if the commands before the last changed."""
    kept = {name: text for name, text in os.environ.items() if name not in LEFT_TO_THE_COMMANDS}
    paths = os.pathsep.join([str(BIN), kept.get("PATH", os.defpath)])
    environment = kept | {"VIRTUAL_ENV": str(VENV), "PATH": paths, "PIP_PROGRESS_BAR": "off"}
    *prepare, build = commands
    key = digest(str(VENV), sys.version, prepare)
    if not COMPLETE.exists() or COMPLETE.read_text() != key:
        shutil.rmtree(VENV, ignore_errors=True)
        run_logged([sys.executable, "-m", "venv", VENV])
        for command in prepare:
            say(command)
            run_logged(["bash", "-euc", command], environment=environment)
        COMPLETE.write_text(key)
    say(build)
    run_logged(["bash", "-euc", build], environment=environment, show=BUILD_PROGRESS)


# --- What was built -------------------------------------------------------------------------------


def output(*command: str | Path) -> str:
    """A program's output. It runs outside the checkout, to import the installed package."""
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
    """The cuobjdump that comes with triton, which comes with torch."""
    found = sorted(BIN.parent.glob("lib/python3*/site-packages/triton/**/bin/cuobjdump"))
    if not found:
        raise CheckError("triton, which brings cuobjdump, is not installed in .venv-cuda")
    return found[0]


def check_import() -> list[Path]:
    """Imports the package; returns its compiled modules of CUDA code."""
    folder = Path(output(BIN / "python", "-c", IMPORT).split()[-1])
    modules = sorted(folder.glob("_cuda*.so"))
    print(f"cuda-check: {', '.join(path.name for path in modules)} import without a driver")
    return modules


def check_kernels(path: Path) -> None:
    name = path.name.partition(".")[0]
    kernels = parse_resource_usage(output(find_cuobjdump(), "--dump-resource-usage", path))
    if not kernels:
        raise CheckError(f"{path.name} holds no kernels")
    problems = kernel_problems(kernels, MODULES[name])
    if name == "_cuda":
        problems += handshake_problems(kernels, MODULES[name])
    if problems:
        raise CheckError("\n".join([f"{path.name}:", *problems]))
    for architecture in sorted({kernel.architecture for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.architecture == architecture]
        print(
            f"cuda-check: {path.name}, {architecture}: {len(mine)} kernels, no local memory, at "
            f"most {max(kernel.registers for kernel in mine)} registers"
        )


def check_gemms(path: Path) -> None:
    functions = parse_sass(output(find_cuobjdump(), "--dump-sass", path))
    gemms = {name: sass for name, sass in functions.items() if "GemmUniversal" in name}
    departing = sum("DepartureEpilogue" in name for name in gemms)
    if not departing or departing == len(gemms):
        raise CheckError(f"{path.name}: {departing} of {len(gemms)} GEMMs send their result")
    problems = [line for name, sass in gemms.items() for line in gemm_problems(name, sass)]
    problems += sum_problems({n: s for n, s in functions.items() if "sum_to_all_kernel" in n})
    problems += switch_sum_problems(
        {n: s for n, s in functions.items() if "switch_sum_kernel" in n}
    )
    if problems:
        raise CheckError("\n".join([f"{path.name}:", *problems]))
    print(
        f"cuda-check: {path.name}: {len(gemms)} GEMMs of wgmma and bulk copies, {departing} of "
        "which send their result, and sums stored at all ranks, by multicast and by the switch too"
    )


def check_doctor() -> None:
    print(output(BIN / "axonn-ext", "doctor"), end="")


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    start = time.monotonic()
    try:
        with exclusive():
            install_tools()
            run_commands(install_commands((ROOT / PAGE).read_text()))
        built = time.monotonic() - start
        for path in check_import():
            check_kernels(path)
            if path.name.startswith("_cuda_sm90"):
                check_gemms(path)
        check_doctor()
    except (CheckError, SetupError) as error:
        print(f"cuda-check: error: {error}")
        return 1
    seconds = time.monotonic() - start
    print(
        f"cuda-check: passed in {seconds:.0f} s, of which {built:.0f} s to install and compile; "
        "nothing was run on a GPU"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
