"""How many labels Goldfish loss leaves of a global batch: what its loss is divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from axonn_ext import collectives
from axonn_ext.data import Batch
from axonn_ext.grid import Grid
from axonn_ext.nn.loss import IGNORE_INDEX


def count_labels(batches: Sequence[Batch], grid: Grid, *, device: str) -> float:
    """Returns the labels of a step's micro-batches on all ranks, equal on all ranks.

    batches: those of this rank's row group. device: of the groups' collectives. Collectives: an
    all-reduce of one int64 over z, and one over data, for which the host waits.
    """
    count = torch.tensor(0, dtype=torch.int64)
    for batch in batches:
        count += (batch.labels != IGNORE_INDEX).sum()
    total = count.reshape(1).to(device)
    for axis in ("z", "data"):
        # Of one number, whatever the run's algorithm is: nothing is left to fuse or to measure.
        total = collectives.all_reduce(total, grid.axis(axis), algorithm="sequential")
    return float(total)
