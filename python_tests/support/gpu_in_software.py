"""What tests ask of the GPU in software (docs/emulate_torch.md), and of no other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

_PROCESS = ctypes.CDLL(None)
only_in_software = pytest.mark.skipif(
    not hasattr(_PROCESS, "gpu_machine_fail"), reason="no GPU in software (make emulate-torch)"
)

OUT_OF_MEMORY, GONE = 2, 214  # cudaErrorMemoryAllocation, cudaErrorECCUncorrectable
NCCL_SYSTEM_ERROR, NCCL_REMOTE_ERROR = 2, 6


def fail(function: str, error: int, *, skipped: int = 0) -> None:
    """The call of this function of CUDA or NCCL, behind so many others, returns an error."""
    _PROCESS.gpu_machine_fail(function.encode(), error, skipped)


def calls_of(function: str) -> int:
    """How often this process has called it."""
    return int(_PROCESS.gpu_machine_calls(function.encode()))


def counted(function: str, call: Callable[[], object]) -> int:
    """How often `call` calls it."""
    before = calls_of(function)
    call()
    return calls_of(function) - before
