"""The specs of the public functions of axonn_ext.ops, whose docstrings are their documentation."""

from __future__ import annotations

from torch import Tensor

from axonn_ext.ops import functions
from axonn_ext.ops.spec import Call, OpSpec
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
        documentation=functions.all_gather_matmul.__doc__,
        collectives=lambda call: [call.group.all_gather(call.a_shard)],
    ),
    OpSpec(
        "matmul_all_gather_rhs",
        results=_matmul_all_gather_rhs,
        documentation=functions.matmul_all_gather_rhs.__doc__,
        collectives=lambda call: [call.group.all_gather(call.b_shard)],
    ),
    OpSpec(
        "matmul_reduce_scatter",
        results=_matmul_reduce_scatter,
        documentation=functions.matmul_reduce_scatter.__doc__,
        collectives=lambda call: _sum_of_product(call, "reduce_scatter"),
    ),
    OpSpec(
        "matmul_all_reduce",
        results=_matmul_all_reduce,
        documentation=functions.matmul_all_reduce.__doc__,
        collectives=lambda call: _sum_of_product(call, "all_reduce"),
    ),
)
