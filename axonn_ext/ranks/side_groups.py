"""How groups of c10d begin and end; those beside a grid's have threads and waits of their own."""

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

# Who waits in such a group knows how long it has waited. (gloo counts milliseconds in 32 bits.)
PATIENCE = timedelta(days=1)


def new_group(
    ranks: Sequence[int] | None = None, *, description: str, backend: str | None = None,
    patience: timedelta | None = None, options: Any = None,
) -> ProcessGroup:  # fmt: skip
    """Returns a new group of these ranks; default all. Only they call it, in the same order.

    It is made within AXONN_TIMEOUT_SECONDS, or not at all. patience: how long a collective of it
    may take; default as long. options: those of NCCL.

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
    """Groups that end together: when they are closed or, if of gloo, when nobody has this object.

    Groups of NCCL that are not closed end with the process: kernels may still use them.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[ProcessGroup, str]] = []  # with the type of its tensors
        self._end = weakref.finalize(self, _collect, self._groups)
        self._end.atexit = False  # all groups end then

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def add(self, group: ProcessGroup) -> None:
        self._groups.append((group, device_type(group)))

    def remove(self, group: ProcessGroup) -> None:
        self._groups[:] = [each for each in self._groups if each[0] is not group]

    def close(self) -> None:
        """Ends the groups, for this rank. On GPUs it waits for the current stream before."""
        if self._end.detach() is None:
            return
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

    c10d names a new group after its ranks and how many groups there are, and the store keeps the
    addresses of a name. So that no name comes again, something else is counted for the group.
    """
    names = dist.distributed_c10d._world.pg_names
    if (name := names.get(group)) is None:
        return
    dist.destroy_process_group(group)
    names[ProcessGroup(dist.HashStore(), 0, 1)] = name


class SideGroups:
    """Groups for several purposes, each made when it is first asked for, and then kept.

    All ranks of the grid must ask for as many, in the same order: c10d names a group after its
    ranks and how many groups a rank has made before. Each group of gloo has a thread that polls 100
    times a second, so what comes one after the other shares them.

    owned: takes the groups, so that they end with others; default: with this object.
    """

    def __init__(self, owned: OwnedGroups | None = None) -> None:
        self._owned = owned or OwnedGroups()
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        self._forgotten: list[ProcessGroup] = []  # of NCCL

    def get(
        self, purpose: str, ranks: Sequence[int] | None = None, *, backend: str = "gloo"
    ) -> ProcessGroup:
        """Returns the group for a purpose, of these ranks; default of all ranks.

        Returns when the other ranks of the group ask for it, too. A group of NCCL has a
        communicator from its first transfer on, or, where `init_process_group` was given a
        device_id, at once: then all ranks must ask for one of NCCL, be it another one.
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

        All ranks call it after a failure, whose messages may still be under way in the old ones.
        """
        for group in self._groups.values():
            if dist.get_backend(group) == "nccl":
                self._forgotten.append(group)
        self._groups.clear()

    def _abort_forgotten(self) -> None:
        """Frees communicators, which nobody uses any more: all ranks begin anew."""
        while self._forgotten:
            group = self._forgotten.pop()
            group.abort()
            self._owned.remove(group)

    def close(self) -> None:
        """Forgets all groups, of which those that `forget` has named are aborted."""
        self._groups.clear()
        self._abort_forgotten()


def _options(backend: str) -> Any:
    """Returns c10d's options of a group: NCCL's stream goes before those of matmuls."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = PATIENCE
    return options
