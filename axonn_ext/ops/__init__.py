"""Matmuls with the collective that feeds or drains them, for use in any model.

W is the number of ranks in `group`, a ProcessGroup or its name; every rank of it makes the same
calls in the same order. Shapes are those of one rank. All ops are differentiable, their gradients
are made of the same ops, and all trace and compile (`torch.compile(fullgraph=True)`).

`algorithm`:

    "fused"       through symmetric memory: peers' data is multiplied where it lies, products are
                  written where their owner reduces them, in a fixed order (bitwise repeatable)
    "chunked"     the library's matmul and c10d's collective cut into a few chunks, pipelined
    "sequential"  the library's matmul, then c10d's collective: the reference
    "auto"        what was measured to be fastest (axonn_ext.warm_up); if nothing was, "fused" where
                  all ranks of the group share a host, else "sequential"

dtypes: float32, float64, bfloat16; under autocast, operands are cast as those of torch.mm are.
Sums over ranks accumulate in float32 (float64 for float64); what crosses ranks has the tensors' own
dtype.

On GPUs float16 is supported, too, and NCCL adds sums over ranks in the tensors' own dtype. "fused"
is for bfloat16 and float16 and up to 8 ranks with a GPU of sm_90 each that reach each other's
memory; it adds sums in float32, and raises NotImplementedError where it cannot run. "auto" measures
it only where `axonn-ext verify` has found it right. Once "auto" is settled, no call makes the host
wait.

Every op raises ValueError or TypeError for arguments that do not fit, naming op, argument, what was
expected and what came; and RuntimeError if a peer dies, fails, does not come within
AXONN_TIMEOUT_SECONDS, or makes a different call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext import _library  # noqa: F401  (registers the ops)
from axonn_ext.ops import _fake  # noqa: F401  (registers what tracing needs)
from axonn_ext.ops._arguments import check_tensor

ALGORITHMS = ("auto", "fused", "chunked", "sequential")

__all__ = [
    "ALGORITHMS",
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
    """Returns all_gather(a_shard, gather_dim) @ b, each shard multiplied as soon as it is there.

        gather_dim=0   a_shard [M / W, K]   b [K, N]   result [M, N]
        gather_dim=1   a_shard [M, K / W]   b [K, N]   result [M, N]

    b may differ between ranks (a column block each, as in a tensor-parallel Linear).
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
    """Returns a @ all_gather(b_shard, gather_dim): the right-hand side, a weight, comes in shards.

        gather_dim=1   a [M, K]   b_shard [K, N / W]   result [M, N]
        gather_dim=0   a [M, K]   b_shard [K / W, N]   result [M, N]

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

        scatter_dim=0   a [M, K]   b [K, N]   result [M / W, N]
        scatter_dim=1   a [M, K]   b [K, N]   result [M, N / W]

    Raises ValueError if W does not divide the scattered dimension.
    Backward: da = all_gather_matmul(dy, b.T), db = matmul_all_gather_rhs(a.T, dy).
    Collectives: one reduce-scatter of the product.
    """
    check_tensor("matmul_reduce_scatter", "a", a)
    check_tensor("matmul_reduce_scatter", "b", b)
    return torch.ops.axonn.matmul_reduce_scatter(a, b, scatter_dim, *_resolve(group), algorithm)


def matmul_all_reduce(
    a: Tensor, b: Tensor, group: ProcessGroup | str, *, algorithm: str = "auto"
) -> Tensor:
    """Returns the sum over ranks of a @ b, on every rank: a [M, K], b [K, N], result [M, N].

    Backward: da = dy @ b.T and db = a.T @ dy, without communication: dy must be whole and equal on
    every rank, as it is where all ranks go on with the same computation.
    Collectives: one all-reduce of the product.
    """
    check_tensor("matmul_all_reduce", "a", a)
    check_tensor("matmul_all_reduce", "b", b)
    return torch.ops.axonn.matmul_all_reduce(a, b, *_resolve(group), algorithm)


def _resolve(group: ProcessGroup | str) -> tuple[str, int]:
    if isinstance(group, str):
        resolve = torch.distributed.distributed_c10d._resolve_process_group
        return group, resolve(group).size()  # type: ignore[arg-type]
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or its name, got {type(group).__name__}")
    return group.group_name, group.size()
