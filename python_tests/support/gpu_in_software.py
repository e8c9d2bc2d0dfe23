"""Functions that only the GPU in software has (docs/gpu_machine.md), for tests."""

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
    """Makes a call of this CUDA or NCCL function return an error, after `skipped` more calls."""
    _PROCESS.gpu_machine_fail(function.encode(), error, skipped)


def calls_of(function: str) -> int:
    """The number of calls of this function in this process."""
    return int(_PROCESS.gpu_machine_calls(function.encode()))


def counted(function: str, call: Callable[[], object]) -> int:
    """The number of times `call` calls this function."""
    before = calls_of(function)
    call()
    return calls_of(function) - before
