"""One-way connections between ranks: through shared memory, or over gloo.

Ranks of one host share memory. The sender copies a message there, and the receiver uses it in
place; the memory returns to the sender when no tensor of the receiver uses it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext import _C
from axonn_ext.pipeline.messages import Form
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.rank_values import of_all_ranks
from axonn_ext.ranks.side_groups import PATIENCE
from axonn_ext.spec import settings


class Outgoing(Protocol):
    """Sends messages to a rank."""

    def send(self, tensor: Tensor) -> None:
        """Returns when the tensor may change. Raises RuntimeError if it cannot be sent."""
        ...


class Incoming(Protocol):
    """Receives messages from a rank."""

    def receive(self, form: Form) -> Tensor | None:
        """Returns the next message, or None if stopped. Raises RuntimeError if none can come."""
        ...

    def stop(self) -> None:
        """Ends a wait, where that is possible."""
        ...


@dataclass
class Channels:
    """This rank's channels through shared memory, by the peer's number in the group.

    everywhere: whether every channel that a rank of the group wanted could be opened.
    """

    senders: Mapping[int, _C.MessageSender]
    receivers: Mapping[int, _C.MessageReceiver]
    everywhere: bool


def open_channels(
    name: str, axis: AxisGroup, *, to: Sequence[int], source: Sequence[int]
) -> Channels:
    """Opens channels to and from ranks of the axis that share memory with this one.

    Collective over the axis; a rank that is named in `to` names this one in `source`.
    Collectives: four all-gathers.
    """
    group, rank = axis.process_group, axis.rank
    senders = _senders(f"{name} of rank {rank}", to)
    addresses = of_all_ranks({n: s.address for n, s in senders.items()}, group)  # by str(n)
    own = str(rank)
    receivers = _receivers({n: addresses[n][own] for n in source if own in addresses[n]})
    opened = of_all_ranks((list(receivers), len(receivers) == len(source)), group)
    for sender in senders.values():
        sender.close_descriptor()
    used = {number: sender for number, sender in senders.items() if rank in opened[number][0]}
    return Channels(used, receivers, all(complete for _, complete in opened))


def _senders(name: str, to: Iterable[int]) -> dict[int, _C.MessageSender]:
    space = settings.load().symmetric_memory_bytes
    try:
        return {n: _C.MessageSender(name=f"{name} to {n}", address_space=space) for n in to}
    except RuntimeError:  # for example, a limit on address space
        return {}


def _receivers(addresses: Mapping[int, str]) -> dict[int, _C.MessageReceiver]:
    receivers = {}
    for number, address in addresses.items():
        try:
            receivers[number] = _C.MessageReceiver(address=address)
        except RuntimeError:  # another host, container or user
            continue
    return receivers


class SharedOutgoing:
    """Sends through shared memory."""

    def __init__(self, sender: _C.MessageSender) -> None:
        self._sender = sender

    def send(self, tensor: Tensor) -> None:
        self._sender.send(tensor)


class SharedIncoming:
    """Receives in place, in memory that the sender allocated."""

    def __init__(self, receiver: _C.MessageReceiver) -> None:
        self._receiver = receiver

    def receive(self, form: Form) -> Tensor | None:
        found = self._receiver.receive(seconds=PATIENCE.total_seconds())
        if found is None:
            return None
        if found.numel() != form.num_bytes:
            raise RuntimeError(f"it has {found.numel()} bytes, but {form} has {form.num_bytes}")
        return found.view(form.dtype).view(form.shape)

    def stop(self) -> None:
        self._receiver.stop()


class GlooOutgoing:
    """Sends over gloo. tag: separates messages of different purposes between the same ranks."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int = 0) -> None:
        self._group, self._peer, self._tag = group, peer, tag

    def send(self, tensor: Tensor) -> None:
        sent = tensor.contiguous()
        _wait(dist.isend(sent, group=self._group, group_dst=self._peer, tag=self._tag))


class GlooIncoming:
    """Receives over gloo. tag: the sender's."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int = 0) -> None:
        self._group, self._peer, self._tag = group, peer, tag

    def receive(self, form: Form) -> Tensor | None:
        tensor = torch.empty(form.shape, dtype=form.dtype)
        _wait(dist.irecv(tensor, group=self._group, group_src=self._peer, tag=self._tag))
        return tensor

    def stop(self) -> None:
        """Does nothing: a gloo receive ends only with the message or the connection."""


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(PATIENCE)
