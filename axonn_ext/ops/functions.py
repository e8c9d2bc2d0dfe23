"""The public ops. The docstring of axonn_ext.ops says what they have in common."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.ops._arguments import check_tensor

__all__ = [
    "all_gather_matmul",
    "matmul_all_gather_rhs",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    group: ProcessGroup | str,
    *,
    gather_dim: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    """Returns all_gather(a_shard, gather_dim) @ b.

    Per rank, in a group of W ranks:

        gather_dim=0   a_shard [M / W, K]   b [K, N]   result [M, N]
        gather_dim=1   a_shard [M, K / W]   b [K, N]   result [M, N]

    Each shard can be multiplied as soon as it has arrived. b may differ between ranks (each has a
    block of columns, as in a tensor-parallel Linear).
    Raises ValueError if the gathered a_shard and b do not fit.
    Backward: da = matmul_reduce_scatter(dy, b.T), db = all_gather_matmul(a_shard.T, dy).
    Collectives: one all-gather of a_shard.
    """
    check_tensor("all_gather_matmul", "a_shard", a_shard)
    check_tensor("all_gather_matmul", "b", b)
    return torch.ops.axonn.all_gather_matmul(a_shard, b, gather_dim, *_resolve(group), algorithm)


def matmul_all_gather_rhs(
    a: Tensor,
    b_shard: Tensor,
    group: ProcessGroup | str,
    *,
    gather_dim: int = 1,
    algorithm: str = "auto",
) -> Tensor:
    """Returns a @ all_gather(b_shard, gather_dim), where b, for example a weight, is sharded.

    Per rank, in a group of W ranks:

        gather_dim=1   a [M, K]   b_shard [K, N / W]   result [M, N]
        gather_dim=0   a [M, K]   b_shard [K / W, N]   result [M, N]

    Raises ValueError if a and the gathered b_shard do not fit.
    Backward: da = matmul_all_gather_rhs(dy, b_shard.T), db = matmul_reduce_scatter(a.T, dy).
    Collectives: one all-gather of b_shard.
    """
    check_tensor("matmul_all_gather_rhs", "a", a)
    check_tensor("matmul_all_gather_rhs", "b_shard", b_shard)
    return torch.ops.axonn.matmul_all_gather_rhs(
        a, b_shard, gather_dim, *_resolve(group), algorithm
    )


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: ProcessGroup | str,
    *,
    scatter_dim: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    """Returns this rank's block of the sum over ranks of a @ b.

    Per rank, in a group of W ranks:

        scatter_dim=0   a [M, K]   b [K, N]   result [M / W, N]
        scatter_dim=1   a [M, K]   b [K, N]   result [M, N / W]

    Sums over ranks accumulate in float32 (float64 for float64), those of NCCL in the tensors'
    dtype.
    Raises ValueError if a and b do not fit, or W does not divide the scattered dimension.
    Backward: da = all_gather_matmul(dy, b.T), db = matmul_all_gather_rhs(a.T, dy).
    Collectives: one reduce-scatter of the product.
    """
    check_tensor("matmul_reduce_scatter", "a", a)
    check_tensor("matmul_reduce_scatter", "b", b)
    return torch.ops.axonn.matmul_reduce_scatter(a, b, scatter_dim, *_resolve(group), algorithm)


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    group: ProcessGroup | str,
    *,
    algorithm: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """Returns the sum over ranks of a @ b, on every rank.

    Per rank:

        a [M, K]   b [K, N]   result [M, N]

    Sums over ranks accumulate in float32 (float64 for float64), those of NCCL in the tensors'
    dtype.
    With deterministic=False, bits may differ from call to call where that is faster: between more
    than two GPUs of sm_90 whose memory has a multicast address, "fused" lets the switch add in
    float32, in its own order. Bits are the same on all ranks. Elsewhere it changes nothing.
    dy, the gradient of the result, must be whole and equal on every rank. It is if all ranks
    compute the same from the result.
    Raises ValueError if a and b do not fit.
    Backward: da = dy @ b.T, db = a.T @ dy, without communication.
    Collectives: one all-reduce of the product.
    """
    check_tensor("matmul_all_reduce", "a", a)
    check_tensor("matmul_all_reduce", "b", b)
    return torch.ops.axonn.matmul_all_reduce(a, b, *_resolve(group), algorithm, deterministic)


def _resolve(group: ProcessGroup | str) -> tuple[str, int]:
    if isinstance(group, str):
        resolve = torch.distributed.distributed_c10d._resolve_process_group
        return group, resolve(group).size()  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or its name, got {type(group).__name__}")
    return group.group_name, group.size()
