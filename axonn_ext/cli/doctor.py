"""`axonn-ext doctor`: reports what is installed, what will be used and why, and what is missing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import axonn_ext
from axonn_ext.kernels import host, verified
from axonn_ext.spec import settings
from axonn_ext.terminal.arguments import new_parser
from axonn_ext.terminal.console import Console, plain_table, say
from axonn_ext.terminal.files import check_writable, write_text

OK, NOTE, PROBLEM = "ok", "note", "problem"
STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "red"}

NO_GPUS_ASKED = "not asked: torch is a CPU build"
ROCM = (
    "sequential, chunked and auto, and triton for products on gfx90a and gfx942; left out, as they "
    "need CUDA: fused, cublaslt, fused_sm90, axonn_ext.ranks.communicators, fill_random_ on GPUs. "
    "No AMD GPU has run any of it yet"
)

DESCRIPTION = """\
Reports what is installed, which GPUs there are, which algorithm each op uses here and why, what is
missing, and how to get it. Starts no process group and needs no GPU. Exit status 0 if everything
that is installed works, 1 if a part of it does not."""

BUILD_WITH_CUDA = (
    "AXONN_CUDA=1 pip install -v --no-build-isolation . (docs/install.md has the requirements)"
)

# A separate process maps memory of this one as a rank maps its peers' memory.
MAP_A_PEER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)[:] != b"axonn_ok")
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    part: str
    name: str
    value: str
    status: str = OK
    remedy: str = ""  # what the user can do about it


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "doctor", run, description=DESCRIPTION)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a JSON file")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a problem."""
    check_writable("--json", args.json)
    findings = [*find_bad_settings(args.bad_settings), *diagnose()]
    if args.json is not None:
        rows = [dataclasses.asdict(finding) for finding in findings]
        write_text("--json", args.json, json.dumps({"findings": rows}, indent=1) + "\n")
    console = Console()
    console.print(_table(findings))
    for finding in findings:
        if finding.remedy:
            text = f"{finding.status}: {finding.name}: {finding.remedy}"
            say(console, text)
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def find_bad_settings(problems: Mapping[str, str]) -> list[Finding]:
    """Returns a finding for each invalid variable, which every other command would refuse.

    The rest of the report is about the defaults of these variables.
    """
    remedy = "unset it, or set it to an allowed value: docs/interfaces.md"
    return [Finding("settings", name, what, PROBLEM, remedy) for name, what in problems.items()]


def diagnose() -> list[Finding]:
    """Returns all findings in the order of the report; few if compiled parts cannot be loaded."""
    shared_memory = find_shared_memory()
    try:
        from axonn_ext.kernels import extension  # noqa: F401
    except ImportError as error:
        broken = Finding("build", "compiled parts", "cannot be loaded", PROBLEM, str(error))
        return [*find_versions(), broken, shared_memory]
    from axonn_ext.ops.specs import SPECS

    devices = find_devices()
    return [
        *find_versions(),
        *find_build(),
        *devices,
        shared_memory,
        *find_verified(settings.load()),
        *find_algorithms(
            can_share=shared_memory.status == OK,
            cuda_kernels={op for op in SPECS if _has_kernel(op, "CUDA")},
        ),
    ]


def _table(findings: Sequence[Finding]) -> Table:
    table = plain_table()
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    part = ""
    for finding in findings:
        table.add_row(
            finding.part if finding.part != part else "",
            finding.name,
            finding.value,
            style=None if finding.status == OK else STYLES[finding.status],
        )
        part = finding.part
    return table


# --- Versions and the build -----------------------------------------------------------------------


def find_versions() -> list[Finding]:
    """Returns the versions of Python and of the packages that we use."""
    try:
        triton = Finding("versions", "triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        triton = Finding("versions", "triton", "none; it has kernels for products and for fused")
    return [
        Finding("versions", "axonn_ext", axonn_ext.__version__),
        Finding("versions", "python", platform.python_version()),
        Finding("versions", "torch", torch.__version__),
        Finding("versions", "GPUs of torch", host.gpu_runtime() or "none: a CPU build"),
        triton,
    ]


def find_build() -> list[Finding]:
    """Returns what is compiled, for which architectures, and against which NCCL."""
    from axonn_ext.kernels import extension

    # _C can be loaded, since this module has imported it.
    findings = [Finding("build", "CPU parts", str(extension.extension_path()))]
    if extension.cuda is None:
        status, remedy, text = OK, "", _why_not("_cuda")
        if host.runs_cuda():
            status = NOTE
            remedy = BUILD_WITH_CUDA
        elif host.gpu_runtime():
            text = f"left out: torch is built for {host.gpu_runtime()}"
        return [*findings, Finding("build", "CUDA parts", text, status, remedy)]
    info = extension.cuda.build_info()
    findings += [
        Finding("build", "CUDA parts", str(extension.cuda.__file__)),
        Finding("build", "architectures", info["architectures"].replace(",", ", ")),
        Finding("build", "nvcc", info["nvcc"]),
    ]
    if extension.cuda_sm90 is not None:
        text = f"{len(extension.cuda_sm90.instances())} GEMMs"
        findings.append(Finding("build", "fused for sm_90", text))
    else:
        why = _why_not("_cuda_sm90")
        findings.append(Finding("build", "fused for sm_90", why, NOTE, BUILD_WITH_CUDA))
    loaded, built = info["nccl"], info["nccl_built"]
    same = loaded.split(".")[:2] == built.split(".")[:2]
    text = loaded if same else f"{loaded} is loaded, {built} was built against"
    remedy = "" if same else "rebuild axonn_ext against the NCCL of this torch"
    findings.append(Finding("build", "NCCL", text, OK if same else NOTE, remedy))
    return findings


def _why_not(module: str) -> str:
    from axonn_ext.kernels import extension

    why = extension.left_out().get(module)
    return f"not built: {why}" if why else f"built, but its file {module}.*.so is gone"


# --- Devices --------------------------------------------------------------------------------------


def find_devices() -> list[Finding]:
    """Returns the GPUs, whether our code runs on them, and which can access each other's memory."""
    from axonn_ext.kernels import extension

    if not torch.cuda.is_available():
        text = "none that torch can use" if host.gpu_runtime() else NO_GPUS_ASKED
        return [Finding("devices", "GPUs", text, NOTE if extension.cuda else OK)]
    count = torch.cuda.device_count()
    findings = []
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        version = (properties.major, properties.minor)
        # AMD's names are like gfx942:sramecc+:xnack-; its version numbers would mean a different
        # NVIDIA GPU.
        amd = torch.version.hip is not None
        kind = properties.gcnArchName.partition(":")[0] if amd else f"sm_{version[0]}{version[1]}"
        text = f"{properties.name}, {kind}, {properties.total_memory >> 30} GiB"
        peers = [p for p in range(count) if p != device and _can_reach(device, p)]
        text += f", reaches {', '.join(map(str, peers)) or 'no other'}" if count > 1 else ""
        runs = extension.cuda is None or runs_on(
            extension.cuda.build_info()["architectures"].split(","), version
        )
        remedy = "" if runs else (
            f"build again with TORCH_CUDA_ARCH_LIST='{version[0]}.{version[1]}'"
        )  # fmt: skip
        findings.append(Finding("devices", f"cuda:{device}", text, OK if runs else PROBLEM, remedy))
    return findings


def runs_on(architectures: Sequence[str], version: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a device.

    sm_XY runs on X.Y and later versions of the same X; PTX also runs on all later devices.
    """
    number = 10 * version[0] + version[1]
    for architecture in architectures:
        kind, _, text = architecture.partition("_")
        if not text.isdigit():  # code for 90a runs on exactly that version
            if kind == "sm" and text.rstrip("af") == str(number):
                return True
            continue
        if int(text) <= number and (kind == "compute" or int(text) // 10 == version[0]):
            return True
    return False


def _can_reach(device: int, peer: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, peer))


# --- What will be used ----------------------------------------------------------------------------


def find_shared_memory() -> Finding:
    """Returns whether processes of this host can map each other's memory, as CPU fused ops need."""
    try:
        descriptor = os.memfd_create("axonn_doctor")
        try:
            os.write(descriptor, b"axonn_ok")
            with mmap.mmap(descriptor, 8):
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
                program = [sys.executable, "-I", "-c", MAP_A_PEER, path]
                done = subprocess.run(program, capture_output=True, check=False, timeout=60)
        finally:
            os.close(descriptor)
        why = "" if done.returncode == 0 else done.stderr.decode().strip().rpartition("\n")[2]
        works = done.returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        works, why = False, str(error)
    if works:
        return Finding("CPU", "shared memory", "processes of this host map each other's")
    remedy = "run the ranks as one user, with /proc mounted and process_vm access allowed"
    return Finding("CPU", "shared memory", f"does not work: {why}", NOTE, remedy)


def find_verified(loaded: settings.Settings) -> list[Finding]:
    """Returns what `axonn-ext verify` found on this machine's GPUs, and what it would unlock."""
    from axonn_ext.kernels import extension
    from axonn_ext.kernels.locked import find_locks

    seen = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    keys = extension.stamp_keys()
    locks = find_locks()
    findings = []
    for key in keys:
        stamp = verified.find(loaded.cache_dir, key) if loaded.cache_dir else None
        verdicts = stamp.verdicts if stamp else {}
        words = [
            f"{name} {_verdict(verdicts[name])}" for name in verified.KERNELS if name in verdicts
        ]
        lock = locks.get(key.gpu)
        if key.gpu not in seen and (len(keys) > 1 or not seen):
            words.append("torch does not see it")
        elif lock is not None and not lock.remedy:
            words.append(lock.line())
        remedy = lock.line() if lock is not None and lock.remedy else ""
        right = not remedy and all(v.passed for v in verdicts.values())
        text = ", ".join(words) or "not run"
        findings.append(Finding("verify", key.gpu, text, OK if right else NOTE, remedy))
    if not keys:  # the driver's files are missing
        findings += [Finding("verify", gpu, lock.line(), NOTE) for gpu, lock in locks.items()]
    return findings


def _verdict(verdict: verified.Verdict) -> str:
    if not verdict.passed:
        return "FAILED"
    return f"right on {verdict.ranks} GPUs" if verdict.ranks > 1 else "right"


def find_algorithms(*, can_share: bool, cuda_kernels: set[str]) -> list[Finding]:
    """Returns which algorithms each op uses on CPU and CUDA tensors, and why."""
    from axonn_ext.kernels import extension
    from axonn_ext.ops.specs import SPECS, linear, matmuls
    from axonn_ext.ranks.communicators import why_none

    default = "fused" if can_share else "sequential"
    reason = "ranks of one host share memory" if can_share else "no shared memory"
    gloo = dist.is_available() and dist.is_gloo_available()
    cpu = f"auto: {default} ({reason}) unless warm_up() measures better; sequential, chunked "
    cpu += "over gloo" if gloo else "not available: torch has no gloo"
    findings = [Finding("algorithms", "CPU tensors", cpu, OK if gloo or can_share else PROBLEM)]
    if not host.gpu_runtime():
        return [*findings, Finding("algorithms", "CUDA tensors", "none: torch is a CPU build")]
    nccl = dist.is_available() and dist.is_nccl_available()  # also true for RCCL
    library = "NCCL" if host.runs_cuda() else "RCCL"
    over = f"over c10d's {library}" if nccl else f"torch has no {library}"
    if not host.runs_cuda():
        findings.append(Finding("algorithms", "ROCm", ROCM))
    why = why_none(extension.cuda)
    text = f"over c10d's {library}, since {why}" if why else "over NCCL communicators of our own"
    findings.append(Finding("algorithms", "collectives of axonn_ext.overlap on CUDA", text))
    products = {spec.name for spec in (*matmuls.SPECS, *linear.SPECS)}
    cutlass = extension.cuda_sm90 is not None
    triton = importlib.util.find_spec("triton") is not None
    sources = [*(["on sm_90 by CUTLASS"] * cutlass), *(["from sm_80 on by Triton"] * triton)]
    fused = f'; "fused" {", else ".join(sources)}' if sources else ""
    for op, spec in SPECS.items():
        there = op in cuda_kernels
        collective = "algorithm" in spec.arguments
        local = "our kernel" if extension.cuda is not None else "torch's kernels"
        text = "no CUDA kernel in this build" if not there else over if collective else local
        if op in products and collective and extension.cuda is not None:
            text += fused
        findings.append(Finding("algorithms", f"{op} on CUDA", text, OK if there else NOTE))
    return findings


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"axonn::{op}", key))
