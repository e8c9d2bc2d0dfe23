"""The transport of a lane's collectives: c10d's group of the axis, or an NCCL communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor

from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.tracing import record_issued

if TYPE_CHECKING:
    from axonn_ext._cuda import CommunicatorGrid


class Started(Protocol):
    """A started collective."""

    def wait(self) -> object:
        """Makes the current stream, or for CPU tensors the host, wait for the result."""


class Transport(Protocol):
    """Issues collectives over the ranks of one axis. All tensors are contiguous.

    All ranks issue the same ones in the same order. On a GPU a collective begins after the work
    already enqueued on the current stream.
    """

    def all_gather(self, output: Tensor, shard: Tensor) -> Started:
        """Gathers the shards into `output`, in rank order."""

    def all_to_all(self, output: Tensor, input: Tensor) -> Started:
        """Sends block r of `input` to rank r; `output` gets one block from each, in rank order."""

    def all_reduce(self, tensor: Tensor) -> Started:
        """Sums in place, in the tensor's dtype."""

    def check(self) -> None:
        """Raises RuntimeError if a collective is known to have failed, here or on another rank."""


class C10dTransport:
    """c10d's process group of the axis; its own watchdog ends the process after a failure."""

    def __init__(self, axis: AxisGroup) -> None:
        self._group = axis.process_group

    def all_gather(self, output: Tensor, shard: Tensor) -> dist.Work:
        return self._group._allgather_base(output, shard)

    def all_to_all(self, output: Tensor, input: Tensor) -> dist.Work:
        return self._group.alltoall_base(output, input, [], [])

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        return self._group.allreduce([tensor])

    def check(self) -> None:
        """Does nothing: c10d reports no failures here."""


class NcclTransport:
    """A separate NCCL communicator, whose collectives are reported to `trace_communication` here.

    Raises: RuntimeError, from every call, once a communicator of the grid has failed on any rank.
    """

    def __init__(self, axis: AxisGroup, communicators: CommunicatorGrid) -> None:
        self._axis, self._all = axis, communicators
        self._own = communicators.axis(axis.axis)

    def all_gather(self, output: Tensor, shard: Tensor) -> Started:
        record_issued("all_gather", "overlap all_gather", shard, self._axis)
        return self._own.all_gather(output, shard)

    def all_to_all(self, output: Tensor, input: Tensor) -> Started:
        record_issued("all_to_all", "overlap all_to_all", input, self._axis)
        return self._own.all_to_all(output, input)

    def all_reduce(self, tensor: Tensor) -> Started:
        record_issued("all_reduce", "overlap all_reduce", tensor, self._axis)
        return self._own.all_reduce(tensor, tensor)

    def check(self) -> None:
        self._all.check()
