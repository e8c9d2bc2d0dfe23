"""The specs of the collectives of axonn_ext.ranks.collectives."""

from __future__ import annotations

from torch import Tensor

from axonn_ext.ops.spec import SUMS, Call, OpSpec


def _all_gather(call: Call) -> Tensor:
    sizes = list(call.shard.shape)
    sizes[call.dim] *= call.group_size
    return call.shard.new_empty(sizes)


def _reduce_scatter(call: Call) -> Tensor:
    sizes = list(call.input.shape)
    sizes[call.dim] //= call.group_size
    return call.input.new_empty(sizes)


SPECS = (
    OpSpec(
        "all_gather",
        results=_all_gather,
        documentation="""\
Returns the shards of all ranks, concatenated along `dim`.

    dim=0   shard [M / W, N]   result [M, N]
    dim=1   shard [M, N / W]   result [M, N]

Backward: reduce_scatter(dy).
Collectives: one all-gather of shard.""",
        collectives=lambda call: [call.group.all_gather(call.shard)],
    ),
    OpSpec(
        "reduce_scatter",
        results=_reduce_scatter,
        documentation=f"""\
Returns this rank's block of the sum over ranks; `dim` is cut into blocks.

    dim=0   input [M, N]   result [M / W, N]
    dim=1   input [M, N]   result [M, N / W]

{SUMS}
Backward: all_gather(dy).
Collectives: one reduce-scatter of input.""",
        collectives=lambda call: [call.group.sum("reduce_scatter", call.input.numel(), call.input)],
    ),
    OpSpec(
        "all_reduce",
        results=lambda call: call.input.new_empty(call.input.shape),
        documentation=f"""\
Returns the sum over ranks (reduce_op "max": the maximum of each element).

    input [M, N]   result [M, N]

{SUMS}
Backward: all_reduce(dy); "max" has none.
Collectives: one all-reduce of input.""",
        collectives=lambda call: [call.group.sum("all_reduce", call.input.numel(), call.input)],
    ),
)
