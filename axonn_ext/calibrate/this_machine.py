"""Describes the machine of a benchmark, and names the dtypes that it accepts."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from axonn_ext._version import __version__
from axonn_ext.kernels import host
from axonn_ext.terminal.errors import UserError

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16
}  # fmt: skip


def describe_machine(*, threads: int, device: str = "cpu") -> dict[str, str | int]:
    """Describes the machine and the software for the results.

    threads: the number of threads per rank. device: the type of device.
    """
    return (_describe_gpus() if device == "cuda" else {}) | {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": host.memory_bytes(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "axonn_ext": __version__,
        "blas": _blas(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads_per_rank": threads,
    }


def default_device() -> str:
    """Returns the device to time by default: "cuda" if there are GPUs, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises UserError for "cuda" if there are no GPUs."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")


def _describe_gpus() -> dict[str, str | int]:
    """Describes the GPUs, their driver and libraries."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "runtime": host.gpu_runtime(),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "tf32": int(torch.backends.cuda.matmul.allow_tf32),
    }


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _blas() -> str:
    """Returns the library that torch.mm calls, with its version if torch reports it."""
    config = torch.__config__.show()
    name = re.search(r"BLAS_INFO=(\w+)", config)
    version = re.search(r"Math Kernel Library Version (\S+)", config)
    label = name[1] if name else "unknown"
    return f"{label} {version[1]}" if version and label == "mkl" else label
