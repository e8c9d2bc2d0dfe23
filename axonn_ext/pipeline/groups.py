"""Groups of gloo beside those of a grid, with ranks of theirs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from axonn_ext.grid import AxisGroup

# Who waits in such a group knows how long it has waited. (gloo counts milliseconds in 32 bits.)
PATIENCE = timedelta(days=1)


def make_group(what: str, axis: AxisGroup) -> ProcessGroup:
    """Returns a new group of an axis's ranks. All ranks of the grid must make it together."""
    ranks = dist.get_process_group_ranks(axis.process_group)
    return dist.new_group(
        ranks, use_local_synchronization=True, timeout=PATIENCE, backend="gloo",
        group_desc=f"{what} (ranks {', '.join(map(str, ranks))})",
    )  # fmt: skip
