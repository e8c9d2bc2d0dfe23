"""Says whether this host has the least memory that a command needs."""

from __future__ import annotations

import torch

from axonn_ext.kernels import host


def memory_problem(what: str, num_bytes: float, device: str) -> str:
    """Says that this host cannot hold that many bytes over all its ranks; "" if it can."""
    there = _device_bytes(device)
    if num_bytes <= there:
        return ""
    needs = f"{what} needs at least {num_bytes / 1e9:,.1f} GB of memory"
    kind = "the GPUs here have" if device == "cuda" else "this machine has"
    return f"{needs}, but {kind} {there / 1e9:,.1f} GB"


def _device_bytes(device: str) -> int:
    """Returns the memory of all GPUs of this host, or of the host itself for "cpu"."""
    if device == "cuda":
        return sum(
            int(torch.cuda.get_device_properties(i).total_memory)
            for i in range(torch.cuda.device_count())
        )
    return host.memory_bytes()
