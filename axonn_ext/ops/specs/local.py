"""The specs of ops that communicate with no other rank."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.ops.spec import Call, OpSpec


def _local_rows(call: Call) -> tuple[Tensor, ...]:
    return torch.empty_like(call.ids), torch.empty_like(call.ids, dtype=torch.bool)


SPECS = (
    OpSpec(
        "local_rows",
        results=_local_rows,
        documentation="""\
Returns (rows, is_here): each id's row in this rank's block of a table, and whether the id belongs
to the block.

    ids [M]   rows [M]   is_here [M]

The rank has num_rows rows of the table, from row `first` on; `rows` are clamped to the block.
On the CPU, and with `check` on other devices (for which the host waits), raises ValueError for ids
that are neither in [0, vocab_size) nor ignore_index. The message names `label`, the value, its
position and the rank.""",
    ),
    OpSpec(
        "fill_random_",
        results=lambda call: None,
        documentation="""\
Fills `out`, a block of a parameter, with random numbers that are the same on every grid.

    out [M, N]

full_sizes are the sizes of the whole parameter, and offsets say where the block lies in it. a and b
are the mean and standard deviation for `distribution` "normal", low and high for "uniform".""",
    ),
)
