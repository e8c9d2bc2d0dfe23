"""The memory that the Linears of a block, the head and the embedding need while they run.

Legend of Linears: n out and k in features on this rank, r and s the sizes of their axes.
"""

from __future__ import annotations

from axonn_ext.planner.memory.stage import Stage


def block_forward(stage: Stage) -> tuple[int, int]:
    """Returns what a block holds while the first Linear of its MLP runs.

    The first number is to be added to what the block keeps for backward; it already excludes what
    the rest of the MLP keeps, which has not run yet. The second number is what the Linear itself
    needs.
    """
    size = stage.size
    up = size.up // stage.x
    hidden = size.hidden // stage.y
    internals = forward_internals(stage, up, hidden, stage.x, stage.y, False)
    first = stage.stream + stage.my * up * stage.width - _mlp_kept(stage), internals
    if not stage.fuses:
        return first
    # Without the first Linear's product, the gathered input of the down Linear may need more.
    inside_down = forward_internals(stage, hidden, size.mlp // stage.x, stage.y, stage.x, False)
    return max(first, (2 * stage.stream, inside_down), key=sum)


def block_backward(stage: Stage) -> tuple[int, int]:
    """Returns what a block's backward holds besides what is kept, and what its Linears need.

    Backward begins with the MLP: its down Linear, its activation and its up Linear. Of these three,
    the one that needs most counts. The rest of the block still keeps its tensors at that moment.
    """
    size, x, y = stage.size, stage.x, stage.y
    hidden, inner, up = size.hidden // y, size.mlp // x, size.up // x
    mlp = stage.my * inner * stage.width
    down = mlp + (inside_down := backward_internals(stage, hidden, inner, y, x, False))
    # When the activation's backward runs, the input of the down Linear has been freed. For
    # silu(gate) * up, the gradients of both factors exist.
    activation = (3 if size.gated else 2) * mlp - _down_input(stage)
    inside_up = backward_internals(stage, up, hidden, x, y, False)
    up_total = stage.my * up * stage.width + stage.stream - _mlp_kept(stage) + inside_up
    if up_total >= max(down, activation):
        return stage.stream + up_total - inside_up, inside_up
    if down >= activation:
        return stage.stream + mlp, inside_down
    return stage.stream + activation, 0


def _down_input(stage: Stage) -> int:
    rows = stage.m if stage.sharded and stage.options.save_gathered else stage.my
    return rows * stage.size.mlp // stage.x * stage.width


def _mlp_kept(stage: Stage) -> int:
    """Returns what the MLP keeps after its first Linear."""
    mlp = stage.my * stage.size.mlp // stage.x * stage.width
    return _down_input(stage) + (3 * mlp if stage.size.gated else mlp)


def forward_internals(stage: Stage, n: int, k: int, r: int, s: int, has_weight: bool) -> int:
    """Returns what a Linear, n x k on this rank, needs in forward.

    It needs the gathered weight and x, and the product before its sum. This holds for the algorithm
    "sequential"; the others do not need more. On GPUs, "fused" keeps the product in a workspace
    (workspaces.py), as well as an operand that it gathers during the product.
    Source: csrc/ops/composed/linear_forward.cpp.

    r, s: the sizes of the Linear's axes. has_weight: whether the gathered weight is there
    already, like a tied table.
    """
    m, width, keeps = stage.m, stage.width, stage.options
    gathers_weight = stage.z > 1 and stage.overlap is None and not has_weight
    gathers_x = stage.sharded and r > 1
    fuses_gather = stage.fuses and s == 1
    inside = 0
    if gathers_weight and not (fuses_gather and not gathers_x and keeps.reshard_after_forward):
        inside += n * k * width
    # A gathered x that is kept counts toward activations.
    if gathers_x and not (fuses_gather or (stage.fuses and keeps.save_gathered)):
        inside += m * k * width
    if s > 1 and not stage.fuses:
        inside += m * n * stage.sum_width + m * n // s * stage.copied_parts
    return inside


def backward_internals(stage: Stage, n: int, k: int, r: int, s: int, has_weight: bool) -> int:
    """Returns what the backward of a Linear needs; see forward_internals for the arguments.

    It needs the gathered dy throughout. In addition, dgrad needs the gathered weight and dx before
    its sum; then wgrad needs the gathered x and the weight's gradient before its sum. On GPUs,
    "fused" keeps both products in workspaces, and the weight if dx has no sum.
    """
    m, width = stage.m, stage.width
    dy = m * n * width if stage.sharded and s > 1 else 0
    gathers_weight = stage.regathers and not has_weight and not (stage.fuses and r == 1)
    dgrad = n * k * width if gathers_weight else 0
    wgrad = 0
    if r > 1:
        if not stage.fuses:
            dgrad += m * k * stage.sum_width + m * k // r * stage.copied_parts
        if stage.sharded and not stage.options.save_gathered:
            wgrad = m * k * width
    if stage.z > 1 and stage.overlap is None and not has_weight and not stage.fuses:
        wgrad += n * k * stage.sum_width + n * k // stage.z * stage.copy
    return dy + max(dgrad, wgrad)


def embedding_rows(stage: Stage) -> int:
    """Returns the bytes that the gradient of the embedding's rows takes.

    It is gathered over x, and copied with zeros in the rows whose ids belong to other ranks.
    """
    whole = stage.m * stage.size.hidden // stage.y * stage.width
    return stage.stream + whole + (whole if stage.x > 1 and stage.sharded else 0)
