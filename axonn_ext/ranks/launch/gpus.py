"""Which GPU a rank takes, and whether ranks of its host share GPUs.

Ranks share a GPU only if they see the same UUID. The number of GPUs each sees tells nothing: with
`srun --gpus-per-task=1`, every rank sees a different GPU as number 0.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import comes
from axonn_ext.spec import settings
from axonn_ext.terminal.errors import MeetingError


def take_gpu(store: Store, process: Process) -> None:
    """Makes this rank's GPU the current one, and lets NCCL accept ranks that share one.

    Call it before NCCL starts, on all ranks. Raises the errors of `shares_gpus`.
    """
    index = gpu_index(process, torch.cuda.device_count())
    torch.cuda.set_device(index)
    if shares_gpus(store, process, str(torch.cuda.get_device_properties(index).uuid)):
        settings.let_ranks_share_gpus(process.rank)


def gpu_index(process: Process, num_gpus: int) -> int:
    """Returns the index of this rank's GPU among those that it sees."""
    return process.rank % process.local_world_size % num_gpus


def shares_gpus(store: Store, process: Process, uuid: str) -> bool:
    """Returns whether two ranks of this host have the same GPU. All ranks of the host call it.

    A rank uses the store at most seven times.

    Raises: MeetingError if a rank of this host does not come within AXONN_TIMEOUT_SECONDS.
    """
    host = process.rank // process.local_world_size
    here = PrefixStore(f"gpus/{host}", store)
    if here.add(uuid, 1) > 1:
        here.set("shared", "")
    if here.add("arrived", 1) == process.local_world_size:
        here.set("answer", "shared" if here.check(["shared"]) else "own")
    seconds = settings.load().timeout_seconds
    if not comes(here, ["answer"], timedelta(seconds=seconds)):
        raise MeetingError(
            f"rank {process.rank} cannot choose its GPU: of the {process.local_world_size} ranks "
            f"of its host, {here.add('arrived', 0)} came within {seconds:g} s "
            "(AXONN_TIMEOUT_SECONDS)"
        )
    return bool(here.get("answer") == b"shared")
