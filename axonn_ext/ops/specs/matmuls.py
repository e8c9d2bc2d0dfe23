"""The specs of the public functions of axonn_ext.ops: a matmul combined with a collective."""

from __future__ import annotations

from torch import Tensor

from axonn_ext.ops.spec import SUMS, Call, OpSpec
from axonn_ext.ops.traffic import Collective


def _all_gather_matmul(call: Call) -> Tensor:
    rows = call.a_shard.shape[0] * (call.group_size if call.gather_dim == 0 else 1)
    return call.a_shard.new_empty((rows, call.b.shape[1]))


def _matmul_all_gather_rhs(call: Call) -> Tensor:
    columns = call.b_shard.shape[1] * (call.group_size if call.gather_dim == 1 else 1)
    return call.a.new_empty((call.a.shape[0], columns))


def _matmul_reduce_scatter(call: Call) -> Tensor:
    rows, columns = call.a.shape[0], call.b.shape[1]
    if call.scatter_dim == 0:
        return call.a.new_empty((rows // call.group_size, columns))
    return call.a.new_empty((rows, columns // call.group_size))


def _matmul_all_reduce(call: Call) -> Tensor:
    return call.a.new_empty((call.a.shape[0], call.b.shape[1]))


def _sum_of_product(call: Call, kind: str) -> list[Collective]:
    return [call.group.sum(kind, call.a.shape[0] * call.b.shape[1], call.a)]


SPECS = (
    OpSpec(
        "all_gather_matmul",
        results=_all_gather_matmul,
        summary="Returns all_gather(a_shard, gather_dim) @ b. Each shard can be multiplied as soon "
        "as it has arrived.",
        shapes="""\
gather_dim=0   a_shard [M / W, K]   b [K, N]   result [M, N]
gather_dim=1   a_shard [M, K / W]   b [K, N]   result [M, N]""",
        details="""\
b may differ between ranks (each has a block of columns, as in a tensor-parallel Linear).
Raises ValueError if the gathered a_shard and b do not fit.""",
        backward="da = matmul_reduce_scatter(dy, b.T), db = all_gather_matmul(a_shard.T, dy)",
        collectives=lambda call: [call.group.all_gather(call.a_shard)],
        traffic="one all-gather of a_shard",
    ),
    OpSpec(
        "matmul_all_gather_rhs",
        results=_matmul_all_gather_rhs,
        summary="Returns a @ all_gather(b_shard, gather_dim), where the right-hand side, for "
        "example a weight, is sharded.",
        shapes="""\
gather_dim=1   a [M, K]   b_shard [K, N / W]   result [M, N]
gather_dim=0   a [M, K]   b_shard [K / W, N]   result [M, N]""",
        details="Raises ValueError if a and the gathered b_shard do not fit.",
        backward="da = matmul_all_gather_rhs(dy, b_shard.T), db = matmul_reduce_scatter(a.T, dy)",
        collectives=lambda call: [call.group.all_gather(call.b_shard)],
        traffic="one all-gather of b_shard",
    ),
    OpSpec(
        "matmul_reduce_scatter",
        results=_matmul_reduce_scatter,
        summary="Returns this rank's block of the sum over ranks of a @ b.",
        shapes="""\
scatter_dim=0   a [M, K]   b [K, N]   result [M / W, N]
scatter_dim=1   a [M, K]   b [K, N]   result [M, N / W]""",
        details=f"""\
{SUMS}
Raises ValueError if a and b do not fit, or W does not divide the scattered dimension.""",
        backward="da = all_gather_matmul(dy, b.T), db = matmul_all_gather_rhs(a.T, dy)",
        collectives=lambda call: _sum_of_product(call, "reduce_scatter"),
        traffic="one reduce-scatter of the product",
    ),
    OpSpec(
        "matmul_all_reduce",
        results=_matmul_all_reduce,
        summary="Returns the sum over ranks of a @ b, on every rank.",
        shapes="a [M, K]   b [K, N]   result [M, N]",
        details=f"""\
{SUMS}
With deterministic=False, bits may differ from call to call where that is faster: the fused kernels
let the switch between more than two GPUs add, if it can. They are the same on all ranks. Elsewhere
it changes nothing.
dy, the gradient of the result, must be whole and equal on every rank. It is if all ranks compute
the same from the result.
Raises ValueError if a and b do not fit.""",
        backward="da = dy @ b.T, db = a.T @ dy, without communication",
        collectives=lambda call: _sum_of_product(call, "all_reduce"),
        traffic="one all-reduce of the product",
    ),
)
