"""The specs of the two passes of a Linear of the 3D matmul, which axonn_ext.nn.Linear calls.

Groups are given in the order (r, s, z): the input is gathered over r, the output is summed over s,
and the rows of the weight are sharded over z. A fourth group has the ranks of all three axes; it is
used only to measure "auto", and no collective is issued in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from axonn_ext.ops.spec import SUMS, Call, OpSpec
from axonn_ext.ops.traffic import Collective

_LEGEND = f"""\
R, S, Z: ranks of the groups r, s and z. `sharded` is True in the lines that do not mention it.
{SUMS}"""


def _forward_results(call: Call) -> tuple[Tensor, ...]:
    r, s, z = call.group_sizes[:3]
    x, weight = call.x, call.weight
    gathers = call.sharded and r > 1
    full_x = list(x.shape)
    full_weight = [weight.shape[0] * z, weight.shape[1]]
    if gathers:
        full_x[call.gather_dim] *= r
    y = [full_x[0], full_weight[0]]
    if call.sharded:
        y[call.scatter_dim] //= s
    return (
        x.new_empty(y),
        x.new_empty(full_x if gathers and call.save_input else [0]),
        weight.new_empty(full_weight if z > 1 and call.save_weight else [0]),
    )


def _forward_collectives(call: Call) -> Iterator[Collective]:
    r, s, z, *_ = call.groups
    yield z.all_gather(call.weight)
    rows = call.x.shape[0]
    if call.sharded:
        yield r.all_gather(call.x)
        rows *= r.size if call.gather_dim == 0 else 1
    product = rows * call.weight.shape[0] * z.size
    yield s.sum("reduce_scatter" if call.sharded else "all_reduce", product, call.x)


def _full_dy(call: Call) -> list[int]:
    """Returns the sizes of dy gathered over s."""
    sizes = list(call.dy.shape)
    if call.sharded:
        sizes[call.scatter_dim] *= call.group_sizes[1]
    return sizes


def _backward_results(call: Call) -> tuple[Tensor, ...]:
    r, _, z = call.group_sizes[:3]
    rows, out_features = _full_dy(call)
    in_features = call.weight.shape[1]
    dx = [rows, in_features]
    if call.sharded:
        dx[call.gather_dim] //= r
    shapes = (dx, [out_features // z, in_features], [out_features])
    return tuple(
        call.dy.new_empty(shape if wanted else [0])
        for shape, wanted in zip(shapes, call.output_mask, strict=True)
    )


def _backward_collectives(call: Call) -> Iterator[Collective]:
    r, s, z, *_ = call.groups
    rows, out_features = _full_dy(call)
    in_features = call.weight.shape[1]
    if call.sharded:
        yield s.all_gather(call.dy)
    if call.output_mask[0]:
        if not call.weight_is_full:
            yield z.all_gather(call.weight)
        kind = "reduce_scatter" if call.sharded else "all_reduce"
        yield r.sum(kind, rows * in_features, call.dy)
    if call.output_mask[1]:
        if call.sharded and not call.x_is_full:
            yield r.all_gather(call.x)
        yield z.sum("reduce_scatter", out_features * in_features, call.dy)


SPECS = (
    OpSpec(
        "linear_forward",
        results=_forward_results,
        documentation=f"""\
Returns (y, full_x, full_weight): the sum over s of x @ weight.T + bias, and the gathered operands.

    gather_dim=0 scatter_dim=0   x [M / R, K]   weight [N / Z, K]   y [M / S, N]
    gather_dim=0 scatter_dim=1   x [M / R, K]   weight [N / Z, K]   y [M, N / S]
    gather_dim=1 scatter_dim=0   x [M, K / R]   weight [N / Z, K]   y [M / S, N]
    gather_dim=1 scatter_dim=1   x [M, K / R]   weight [N / Z, K]   y [M, N / S]
    sharded=False                x [M, K]       weight [N / Z, K]   y [M, N]

{_LEGEND}
bias [N] is added once, to the sum. With save_input, full_x is the gathered x [M, K] if it was
gathered (`sharded` and R > 1). With save_weight, full_weight is the gathered weight [N, K] if
Z > 1. Otherwise they are empty, of shape [0]. deterministic is that of matmul_all_reduce.
Backward: linear_backward.
Collectives: all-gather of weight over z; if sharded, all-gather of x over r and reduce-scatter of
the product over s, else all-reduce of the product over s.""",
        collectives=_forward_collectives,
    ),
    OpSpec(
        "linear_backward",
        results=_backward_results,
        documentation=f"""\
Returns (dx, dweight, dbias): the gradients of linear_forward, given that of y.

    gather_dim=0 scatter_dim=0   dy [M / S, N]   x [M / R, K]   weight [N / Z, K]   dx [M / R, K]
    gather_dim=0 scatter_dim=1   dy [M, N / S]   x [M / R, K]   weight [N / Z, K]   dx [M / R, K]
    gather_dim=1 scatter_dim=0   dy [M / S, N]   x [M, K / R]   weight [N / Z, K]   dx [M, K / R]
    gather_dim=1 scatter_dim=1   dy [M, N / S]   x [M, K / R]   weight [N / Z, K]   dx [M, K / R]
    sharded=False                dy [M, N]       x [M, K]       weight [N / Z, K]   dx [M, K]

{_LEGEND}
dweight is [N / Z, K] and dbias [N]; results that output_mask does not ask for are empty, of shape
[0]. With x_is_full, x is the gathered full_x [M, K] of forward; with weight_is_full, weight is its
gathered full_weight [N, K].
Backward: a second derivative is refused.
Collectives: all-gather of dy over s if sharded; for dx all-gather of weight over z, and
reduce-scatter over r (all-reduce if not sharded); for dweight all-gather of x over r if sharded,
and reduce-scatter over z.""",
        collectives=_backward_collectives,
    ),
)
