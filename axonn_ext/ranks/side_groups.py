"""How c10d groups begin and end, including extra groups with their own threads and waits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from axonn_ext.ranks import meeting
from axonn_ext.ranks.rank_values import device_type
from axonn_ext.spec import settings

# The caller limits its own waits in such a group. (gloo counts milliseconds in 32 bits.)
PATIENCE = timedelta(days=1)


def new_group(
    ranks: Sequence[int] | None = None, *, description: str, backend: str | None = None,
    patience: timedelta | None = None, options: Any = None,
) -> ProcessGroup:  # fmt: skip
    """Returns a new group of these ranks; default all. Only they call it, in the same order.

    It is made within AXONN_TIMEOUT_SECONDS, or not at all. patience: how long one of its
    collectives may take; default: the same. options: those of NCCL.

    Raises RuntimeError, which names the ranks that do not come in time.
    """
    members = list(range(dist.get_world_size()) if ranks is None else ranks)
    meeting.same_in_world({}, what=f"group {description}", ranks=members)
    limit = timedelta(seconds=settings.load().timeout_seconds)
    group = dist.new_group(
        members, use_local_synchronization=ranks is not None, backend=backend, pg_options=options,
        timeout=limit if options is None or patience is None else patience, group_desc=description,
    )  # fmt: skip
    meeting.connect(group)
    if options is None and patience is not None:  # gloo has connected, NCCL does at the first call
        _set_pg_timeout(patience, group)
    return group


class OwnedGroups:
    """Groups that end together: on `close` or, for gloo, when this object is garbage-collected.

    NCCL groups that are not closed end with the process: kernels may still use them.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[ProcessGroup, str]] = []  # with their device types
        self._end = weakref.finalize(self, _collect, self._groups)
        self._end.atexit = False  # all groups end then anyway
        # Compiled code may depend on it, but not on a finalizer, whose class counts all others.
        self.closed = False

    def add(self, group: ProcessGroup) -> None:
        self._groups.append((group, device_type(group)))

    def remove(self, group: ProcessGroup) -> None:
        self._groups[:] = [each for each in self._groups if each[0] is not group]

    def close(self) -> None:
        """Ends the groups, for this rank. On GPUs it first waits for the current stream."""
        if self._end.detach() is None:
            return
        self.closed = True
        if any(kind == "cuda" for _, kind in self._groups):
            torch.cuda.current_stream().synchronize()
        while self._groups:
            destroy(self._groups.pop()[0])


def _collect(groups: list[tuple[ProcessGroup, str]]) -> None:
    while groups:
        group, kind = groups.pop()
        if kind == "cpu":
            destroy(group)


def destroy(group: ProcessGroup) -> None:
    """Ends a group, for this rank, unless its world has been destroyed.

    c10d names a new group after its ranks and the number of groups, and the store keeps the
    addresses of a name. So that no name is reused, a dummy group takes this one's place in the
    count.
    """
    names = dist.distributed_c10d._world.pg_names
    if (name := names.get(group)) is None:
        return
    dist.destroy_process_group(group)
    names[ProcessGroup(dist.HashStore(), 0, 1)] = name


class SideGroups:
    """Groups for several purposes, each made on first use, and then kept.

    All ranks of the grid must ask for the same number of groups, in the same order: c10d names a
    group after its ranks and the number of groups a rank has made before. Each gloo group has a
    thread that polls 100 times a second, so successive users share groups.

    owned: takes the groups, so that they end with its others; default: with this object.
    """

    def __init__(self, owned: OwnedGroups | None = None) -> None:
        self._owned = owned or OwnedGroups()
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        self._forgotten: list[ProcessGroup] = []  # of NCCL

    def get(
        self, purpose: str, ranks: Sequence[int] | None = None, *, backend: str = "gloo"
    ) -> ProcessGroup:
        """Returns the group for a purpose, of these ranks; default: all ranks.

        Returns once the other ranks of the group ask for it, too. An NCCL group has a communicator
        from its first transfer on or, if `init_process_group` was given a device_id, at once: then
        all ranks must ask for an NCCL group at the same time, even if for different ones.
        """
        members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        key = (purpose, members)
        if self._owned.closed:
            raise RuntimeError(f"side group {purpose!r}: the grid is closed: make another one")
        if key not in self._groups:
            self._abort_forgotten()
            self._groups[key] = new_group(
                members, description=f"{purpose} (ranks {', '.join(map(str, members))})",
                backend=backend, patience=PATIENCE, options=_options(backend),
            )  # fmt: skip
            self._owned.add(self._groups[key])
        return self._groups[key]

    def forget(self) -> None:
        """Makes new groups from now on.

        All ranks call it after a failure, since messages may still be under way in the old ones.
        """
        for group in self._groups.values():
            if dist.get_backend(group) == "nccl":
                self._forgotten.append(group)
        self._groups.clear()

    def _abort_forgotten(self) -> None:
        """Frees communicators that nobody uses any more, since all ranks begin anew."""
        while self._forgotten:
            group = self._forgotten.pop()
            group.abort()
            self._owned.remove(group)

    def close(self) -> None:
        """Forgets all groups, and aborts the NCCL groups dropped by `forget`."""
        self._groups.clear()
        self._abort_forgotten()


def _options(backend: str) -> Any:
    """Returns c10d's options for a group: NCCL's stream gets priority over those of matmuls."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = PATIENCE
    return options
