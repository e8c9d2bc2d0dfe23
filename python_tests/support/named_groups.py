"""Groups that reuse the name of an earlier group, as when a process joins a new world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def group_named(name: str, attempt: int, *, description: str = "undefined") -> Iterator[str]:
    """A group of this name, which shares its keys in the store with all others of the name.

    Only gloo gets a separate prefix, as it would trip over the old keys.
    """
    c10d = dist.distributed_c10d
    store, rank, size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/{attempt}", store), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name)
    group._set_group_desc(description)
    torch._C._distributed_c10d._register_process_group(name, group)
    try:
        yield name
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)
