"""Describes this machine from the operating system's information, without touching a device."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def gpu_runtime() -> str:
    """Returns torch's runtime for GPUs, "CUDA 13.0" or "ROCm 7.1"; empty for a CPU build.

    In both cases, torch calls tensors on GPUs "cuda".
    """
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda is not None else ""


def runs_cuda() -> bool:
    """Whether torch is built for NVIDIA GPUs, as CUDA kernels and libraries need."""
    return torch.version.cuda is not None and torch.version.hip is None


def memory_bytes() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor() -> str:
    """Returns the model of this machine's processors, since timings hold only for one model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # this kind of machine does not have the file
    return platform.machine()


def nvidia_gpus(driver: Path = DRIVER) -> list[str]:
    """Returns the models of this machine's NVIDIA GPUs, each once, from the driver's files."""
    models = set()
    for path in driver.glob("gpus/*/information"):
        match = re.search(r"^Model:\s*(.+)$", _text_of(path), re.MULTILINE)
        models.add(match[1].strip() if match else "an NVIDIA GPU")
    return sorted(models)


def amd_gpus(nodes: Path = AMD_NODES) -> list[str]:
    """Returns the architectures of this machine's AMD GPUs, each once, with their SIMD counts."""
    models = set()
    for path in nodes.glob("*/properties"):
        found = dict(re.findall(r"^(\w+) (\d+)$", _text_of(path), re.MULTILINE))
        version = int(found.get("gfx_target_version", 0))  # 90402 means 9.4.2; it is 0 for a CPU
        if version:
            name = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            models.add(f"AMD {name}, {found.get('simd_count', '?')} SIMDs")
    return sorted(models)


def nvidia_driver(driver: Path = DRIVER) -> str:
    """Returns the version of NVIDIA's driver, like 580.65.06; empty if there is none."""
    match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", _text_of(driver / "version"))
    return match[1] if match else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
