"""Groups of gloo beside those of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from axonn_ext.grid import AxisGroup

# Who waits in such a group knows how long it has waited. (gloo counts milliseconds in 32 bits.)
PATIENCE = timedelta(days=1)


def make_group(what: str, axis: AxisGroup | None = None) -> ProcessGroup:
    """Returns a new group of an axis's ranks; default of all ranks.

    All ranks of the grid must make it together. It is never destroyed alone: c10d would give the
    next group its name, under which the store still has the addresses of this one.
    """
    ranks: Sequence[int] = range(dist.get_world_size())
    if axis is not None:
        ranks = dist.get_process_group_ranks(axis.process_group)
    return dist.new_group(
        list(ranks), use_local_synchronization=True, timeout=PATIENCE, backend="gloo",
        group_desc=f"{what} (ranks {', '.join(map(str, ranks))})",
    )  # fmt: skip
