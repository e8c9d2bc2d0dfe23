"""The specs of the collectives of axonn_ext.collectives."""

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
        summary="Returns the shards of all ranks, concatenated along `dim`.",
        shapes="""\
dim=0   shard [M / W, N]   result [M, N]
dim=1   shard [M, N / W]   result [M, N]""",
        backward="reduce_scatter(dy)",
        collectives=lambda call: [call.group.all_gather(call.shard)],
        traffic="one all-gather of shard",
    ),
    OpSpec(
        "reduce_scatter",
        results=_reduce_scatter,
        summary="Returns this rank's block of the sum over ranks; `dim` is cut into blocks.",
        shapes="""\
dim=0   input [M, N]   result [M / W, N]
dim=1   input [M, N]   result [M, N / W]""",
        details=SUMS,
        backward="all_gather(dy)",
        collectives=lambda call: [call.group.sum("reduce_scatter", call.input.numel(), call.input)],
        traffic="one reduce-scatter of input",
    ),
    OpSpec(
        "all_reduce",
        results=lambda call: call.input.new_empty(call.input.shape),
        summary='Returns the sum over ranks (reduce_op "max": the maximum of each element).',
        shapes="input [M, N]   result [M, N]",
        details=SUMS,
        backward='all_reduce(dy); "max" has none',
        collectives=lambda call: [call.group.sum("all_reduce", call.input.numel(), call.input)],
        traffic="one all-reduce of input",
    ),
)
