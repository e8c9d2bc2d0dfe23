"""Helpers shared by the launchers of our Triton kernels: operands, device limits, constants."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from axonn_ext.kernels.triton.tile_configs import (
    AMD_LIMITS,
    DESCRIPTOR_ALIGNMENT,
    DTYPE_BYTES,
    SM80,
    SM90,
    DeviceLimits,
    Problem,
    TileConfig,
    amd_limits,
    best_config,
    device_limits,
    shared_bytes,
    why_illegal,
)

DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Returns the limits of a GPU; in the interpreter, those of sm_90 with few SMs."""
    if interpreting():
        return device_limits(SM90.architecture, 4, SM90.shared_bytes_per_block)
    if torch.version.hip is not None:
        found = torch.cuda.get_device_properties(device)
        return amd_limits(gfx_name(device), found.multi_processor_count)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    major, minor = torch.cuda.get_device_capability(device)
    return device_limits(
        major * 10 + minor, properties["multiprocessor_count"], properties["max_shared_mem"]
    )


def gfx_name(device: torch.device) -> str:
    """Returns the architecture of an AMD GPU, like gfx942, without its feature flags."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def is_known(device: torch.device) -> bool:
    """Whether our kernels support this GPU, or run in the interpreter."""
    if interpreting():
        return True
    if torch.version.hip is not None:
        return gfx_name(device) in AMD_LIMITS
    return torch.cuda.get_device_capability(device) >= divmod(SM80.architecture, 10)


@dataclass(frozen=True)
class Operand:
    """A matrix that our kernels read in place, without a copy."""

    tensor: Tensor

    @property
    def layout(self) -> str:
        """N if rows are contiguous, T if columns are, S if neither are."""
        rows, columns = self.tensor.shape
        by_row, by_column = self.tensor.stride()
        if by_column == 1 or columns <= 1:
            return "N"
        return "T" if by_row == 1 or rows <= 1 else "S"

    @property
    def transposed(self) -> bool:
        return self.layout == "T"

    @property
    def aligned(self) -> bool:
        """Whether a tensor descriptor can read the matrix."""
        matrix = self.tensor.t() if self.transposed else self.tensor
        pitch = matrix.stride(0) * matrix.element_size()
        return (
            matrix.numel() > 0
            and matrix.stride(1) == 1
            and matrix.stride(0) >= matrix.size(1)
            and pitch % DESCRIPTOR_ALIGNMENT == 0
            and matrix.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
        )

    @property
    def vectors(self) -> bool:
        """Whether pointers can read the matrix in vectors; Triton looks for multiples of 16."""
        matrix = self.tensor.t() if self.transposed else self.tensor
        return (
            matrix.stride(1) == 1
            and matrix.stride(0) % 16 == 0
            and matrix.size(1) % 16 == 0
            and matrix.data_ptr() % 16 == 0
        )

    def source(self, block_rows: int, block_columns: int, *, descriptor: bool) -> Any:
        """Returns the source for a kernel's load_tile: a pointer or a descriptor."""
        if not descriptor:
            return self.tensor
        if self.transposed:
            return TensorDescriptor.from_tensor(self.tensor.t(), [block_columns, block_rows])
        return TensorDescriptor.from_tensor(self.tensor, [block_rows, block_columns])


def checked_config(
    name: str, config: TileConfig | None, problem: Problem, limits: DeviceLimits
) -> TileConfig:
    """Returns the config, or the heuristic's for None. Raises ValueError for an illegal one."""
    if config is None:
        return best_config(problem, limits)
    if why := why_illegal(config, problem, limits):
        raise ValueError(f"{name}: config {why}")
    return config


def constants_of(config: TileConfig) -> dict[str, Any]:
    """Returns the compile-time constants of every kernel that multiplies tiles."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "DESCRIPTORS": config.descriptors,
        "UPCAST": interpreting(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def num_programs(config: TileConfig, limits: DeviceLimits, dtype: torch.dtype, tiles: int) -> int:
    """Returns the size of a persistent grid: as many programs as fit, at most one per tile."""
    threads = config.num_warps * limits.warp_size
    accumulators = config.block_m * config.block_n // threads
    registers = threads * min(accumulators + 64, 255)
    shared = shared_bytes(config, dtype.itemsize, amd=limits.is_amd)
    per_sm = min(limits.registers_per_sm // registers, limits.shared_bytes_per_block // shared, 4)
    return min(limits.num_sms * max(per_sm, 1), tiles)
