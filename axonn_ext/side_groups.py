"""Groups of gloo beside those of a grid, for threads and waits of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

# Who waits in such a group knows how long it has waited. (gloo counts milliseconds in 32 bits.)
PATIENCE = timedelta(days=1)


class SideGroups:
    """Groups for several purposes, each made when it is first asked for, and then kept.

    All ranks of the grid must ask for the same ones in the same order. Each has a thread that polls
    100 times a second, so what comes one after the other shares them. None is destroyed alone:
    c10d would give the next group its name, under which the store still has its addresses.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}

    def get(self, purpose: str, like: ProcessGroup | None = None) -> ProcessGroup:
        """Returns the group for a purpose, of the ranks of another one; default of all ranks."""
        ranks: Sequence[int] = range(dist.get_world_size())
        if like is not None:
            ranks = dist.get_process_group_ranks(like)
        key = (purpose, tuple(ranks))
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                list(ranks), use_local_synchronization=True, timeout=PATIENCE, backend="gloo",
                group_desc=f"{purpose} (ranks {', '.join(map(str, ranks))})",
            )  # fmt: skip
        return self._groups[key]

    def forget(self) -> None:
        """Makes new groups from now on.

        All ranks call it after a failure, whose messages may still be under way in the old ones.
        """
        self._groups.clear()
