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

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ops.specs import SPECS
from axonn_ext.spec.parallel import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "all_gather_matmul",
    "matmul_all_gather_rhs",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

_Op = TypeVar("_Op", bound=Callable[..., Tensor])


def _documented(function: _Op) -> _Op:
    """Returns the function, with the documentation that the OpSpec of its name has."""
    function.__doc__ = SPECS[function.__name__].documentation
    return function


@_documented
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    group: ProcessGroup | str,
    *,
    gather_dim: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    check_tensor("all_gather_matmul", "a_shard", a_shard)
    check_tensor("all_gather_matmul", "b", b)
    return torch.ops.axonn.all_gather_matmul(a_shard, b, gather_dim, *_resolve(group), algorithm)


@_documented
def matmul_all_gather_rhs(
    a: Tensor,
    b_shard: Tensor,
    group: ProcessGroup | str,
    *,
    gather_dim: int = 1,
    algorithm: str = "auto",
) -> Tensor:
    check_tensor("matmul_all_gather_rhs", "a", a)
    check_tensor("matmul_all_gather_rhs", "b_shard", b_shard)
    return torch.ops.axonn.matmul_all_gather_rhs(
        a, b_shard, gather_dim, *_resolve(group), algorithm
    )


@_documented
def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: ProcessGroup | str,
    *,
    scatter_dim: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    check_tensor("matmul_reduce_scatter", "a", a)
    check_tensor("matmul_reduce_scatter", "b", b)
    return torch.ops.axonn.matmul_reduce_scatter(a, b, scatter_dim, *_resolve(group), algorithm)


@_documented
def matmul_all_reduce(
    a: Tensor, b: Tensor, group: ProcessGroup | str, *, algorithm: str = "auto"
) -> Tensor:
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
