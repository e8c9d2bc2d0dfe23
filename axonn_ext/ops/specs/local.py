"""Ops of one rank alone."""

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
        summary="Returns (rows, is_here): each id's row among those that this rank has of a table, "
        "and whether it is there.",
        shapes="ids [M]   rows [M]   is_here [M]",
        details="""\
The rank has num_rows rows from `first` on; `rows` are clamped to those.
On the CPU, and elsewhere if `check` (the host waits), raises ValueError for ids that are neither in
[0, vocab_size) nor ignore_index; it names `label`, value, position and rank.""",
    ),
    OpSpec(
        "fill_random_",
        results=lambda call: None,
        summary="Fills `out`, a block of a parameter, with the numbers that its elements have on "
        "every grid.",
        shapes="out [M, N]",
        details="""\
full_sizes are those of the parameter, offsets are where the block lies in it. a and b are mean and
standard deviation, or low and high, by `distribution`.""",
    ),
)
