"""Exchanges whole rows for blocks of features, and back, between the ranks of an (x, y) plane.

Legend: n rows on every rank; K and N in and out features; Gx and Gy ranks along x and y. The rows
of all ranks of a plane are ordered by rank.

An expand Linear gathers rows over x and scatters its output's rows over y. For the output rows to
belong to ranks with the same y, so that the way back crosses only x, rank (x, y) needs as input the
rows of Gy consecutive ranks, and these have several x and y: the way in crosses the whole plane,
but sends each element at most once, as does the way back.
"""

from __future__ import annotations

from torch import Tensor

from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid


def rows_to_features(rows: Tensor, grid: Grid) -> Tensor:
    """Returns the block of an expand Linear's input, [n Gy, K / Gy], given own rows [n, K].

    Collectives: an all-to-all over x, y and z (over y if x is 1); the reverse in backward.
    """
    num_x, num_y = grid.size("x"), grid.size("y")
    if num_y == 1:
        return rows
    n = len(rows)
    blocks = rows.unflatten(1, (num_y, -1)).transpose(0, 1).flatten(0, 1)  # [Gy n, K / Gy]
    if num_x == 1:
        axis = grid.axis("y")
        return collectives.all_to_all(blocks, axis, send=[n] * num_y, receive=[n] * num_y)
    # Only this plane's ranks of the model's group take part: x is its fastest axis, then y.
    axis = grid.model_group
    send, receive = [0] * axis.size, [0] * axis.size
    own = grid.part(("y", "x"))
    plane = axis.rank - own
    for y in range(num_y):
        send[plane + y * num_x + own // num_y] = n
        receive[plane + grid.coords["x"] * num_y + y] = n
    return collectives.all_to_all(blocks, axis, send=send, receive=receive)


def features_to_rows(output: Tensor, grid: Grid) -> Tensor:
    """Returns this rank's rows [n, N], given its block of an expand Linear's output [n Gx, N / Gx].

    Collectives: an all-to-all over x; the reverse in backward.
    """
    num_x = grid.size("x")
    if num_x == 1:
        return output
    n = len(output) // num_x
    axis = grid.axis("x")
    blocks = collectives.all_to_all(output, axis, send=[n] * num_x, receive=[n] * num_x)
    return blocks.unflatten(0, (num_x, n)).transpose(0, 1).flatten(1)
