"""The baseline for a matmul with a collective: torch's symmetric memory, which needs GPUs.

torch.ops.symm_mem has the same signatures in torch 2.11 to 2.15; groups need not be enabled.

Source: torch/distributed/_symmetric_memory/__init__.py and
torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.cpp of torch 2.11.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.errors import UserError

NAME = "torch-symm-mem"
# The all-reduce of torch's symmetric memory supports only these.
ALL_REDUCE_DTYPES = ("fp32", "bf16")


def why_refused(op: str, grid: GridShape, *, dtype: str, device: str) -> str:
    """Returns why the baseline cannot run, as far as one process can tell; "" if it can."""
    if device != "cuda":
        return f"torch.ops.symm_mem has kernels only for GPUs, got --device {device}"
    if grid.x < 2:
        return f"it needs two ranks or more, got {grid.x}"
    if grid.x > torch.cuda.device_count():
        return (
            f"it needs a GPU for each rank, got {torch.cuda.device_count()} for {grid.x} ranks: "
            "those that share one take turns on it, while its barriers wait for all"
        )
    if op == "gemm-ar" and dtype not in ALL_REDUCE_DTYPES:
        return f"its all-reduce adds {' and '.join(ALL_REDUCE_DTYPES)}, got {dtype}"
    return ""


def bind_symm_mem(op: str, a: Tensor, b: Tensor, axis: AxisGroup) -> Callable[[], Tensor]:
    """Returns the baseline's call for a bench op on a rank's operands. All ranks must call this.

    ag-gemm, gemm-rs   torch's fused ops, without returning the gathered A, as in ours
    gemm-ar            torch has no fused op, so this is torch.mm into symmetric memory and then its
                       all-reduce in place, by multicast if the GPUs have it, else in two shots. The
                       result stays in that memory, which the next call overwrites; no copy is timed
    """
    # Imported here so as not to slow down commands that do not need it. It defines the ops.
    import torch.distributed._symmetric_memory as symmetric_memory

    if op == "ag-gemm":
        return lambda: _all_gather_matmul(a, b, axis.name)
    if op == "gemm-rs":
        return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, axis.name)
    result = symmetric_memory.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    handle = symmetric_memory.rendezvous(result, axis.process_group)
    all_reduce = (
        torch.ops.symm_mem.multimem_all_reduce_
        if handle.multicast_ptr
        else torch.ops.symm_mem.two_shot_all_reduce_
    )

    def matmul_all_reduce() -> Tensor:
        # An all-reduce ends only after all ranks have read `result`, so it can be overwritten now.
        torch.mm(a, b, out=result)
        return all_reduce(result, "sum", axis.name)

    return matmul_all_reduce


def _all_gather_matmul(a_shard: Tensor, b: Tensor, group_name: str) -> Tensor:
    _, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        a_shard, [b], 0, group_name, return_A=False
    )
    return product


def require_peer_access(num_ranks: int) -> None:
    """Raises the same UserError on all ranks if a rank's GPU cannot access a peer's memory.

    Rank i has GPU i.
    """
    for own in range(num_ranks):
        for peer in range(num_ranks):
            if own != peer and not torch.cuda.can_device_access_peer(own, peer):
                raise UserError(
                    f"--baseline {NAME} needs GPUs that reach each other's memory, which GPU {own} "
                    f"and GPU {peer} do not"
                )
