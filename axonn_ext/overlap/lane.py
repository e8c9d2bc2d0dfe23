"""Collectives of one axis, started in program order and waited for later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.grid import AxisGroup
from axonn_ext.overlap.watch import POLL_SECONDS, CommunicationError, Watch


@dataclass(eq=False)
class Collective:
    """One that is under way."""

    signature: str
    sequence: int
    done: threading.Event = field(default_factory=threading.Event)
    work: dist.Work | None = None
    retired: bool = False


class Lane:
    """A FIFO of collectives over the ranks of one axis.

    `wait_at_once`: each collective is waited for as soon as it is started, and everything else is
    as it would be otherwise.
    """

    def __init__(self, axis: AxisGroup, lanes: _C.Lanes, watch: Watch) -> None:
        self.axis = axis
        self.wait_at_once = False
        self._lanes, self._watch = lanes, watch
        self._group = axis.process_group
        self._lane = lanes.add_lane(axis.axis)

    @property
    def totals(self) -> _C.LaneTotals:
        return self._lanes.totals(self._lane)

    def take_records(self) -> list[_C.LaneTask]:
        return self._lanes.take_records(self._lane)

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> Collective:
        """Starts output = the ranks' shards, one after another; both contiguous."""

        def start() -> dist.Work:
            return self._group._allgather_base(output, shard)

        return self._issue("all_gather", what, shard, output.nbytes, start)

    def all_to_all(self, output: Tensor, input: Tensor, what: str) -> Collective:
        """Starts the exchange of the blocks of which `input` has one for each rank."""

        def start() -> dist.Work:
            return self._group.alltoall_base(output, input, [], [])

        return self._issue("reduce_scatter", what, input, input.nbytes, start)

    def all_reduce(self, tensor: Tensor, what: str) -> Collective:
        """Starts the sum over ranks, in place."""

        def start() -> dist.Work:
            return self._group.allreduce([tensor])

        return self._issue("all_reduce", what, tensor, tensor.nbytes, start)

    def check_order(self) -> None:
        """Compares what the ranks of the axis have issued so far.

        Raises: CommunicationError if they differ. Collectives: an all-gather of 8 bytes.
        """
        own = torch.tensor([self._watch.digest])
        digests = torch.empty(self.axis.size, dtype=own.dtype)
        signature, sequence = "all_gather of the order of collectives", self._watch.num_issued
        self.wait(self.all_gather(digests, own, signature.removeprefix("all_gather of ")))
        if (digests != own).any():
            problem = "ranks have issued different collectives since the last such check"
            raise self._watch.failure(sequence, signature, problem)

    def _issue(
        self, kind: str, what: str, tensor: Tensor, num_bytes: int, start: Callable[[], dist.Work]
    ) -> Collective:
        dtype = str(tensor.dtype).removeprefix("torch.")
        signature = f"{kind} of {what} ({tensor.numel()} {dtype} per rank)"
        self._watch.issue(signature)
        sequence = self._lanes.submit(self._lane, f"{kind} {what}", num_bytes)
        collective = Collective(signature, sequence)
        try:
            collective.work = start()
        except RuntimeError as error:
            raise self._watch.failure(sequence, signature, _first_line(error)) from error

        def finished(_: torch.futures.Future[object]) -> None:
            self._lanes.finished(self._lane, sequence)
            collective.done.set()

        collective.work.get_future().add_done_callback(finished)
        if self.wait_at_once:
            self.wait(collective)
        return collective

    def wait(self, collective: Collective) -> None:
        """Returns once the collective is done; at once if it was waited for before.

        Raises: CommunicationError if it failed, or takes longer than AXONN_TIMEOUT_SECONDS.
        """
        if collective.retired:
            return
        waited_from = self._lanes.now()
        deadline = time.monotonic() + self._watch.timeout_s
        # The first look is short; from then on a failure of another rank ends the wait, too.
        while not collective.done.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                problem = f"not done after {self._watch.timeout_s:g} s (AXONN_TIMEOUT_SECONDS)"
                raise self._failed(collective, problem)
            if self._watch.someone_failed() and not collective.done.wait(POLL_SECONDS):
                raise self._failed(collective, "given up, since another rank has failed")
        assert collective.work is not None
        try:
            collective.work.wait()
        except RuntimeError as error:
            raise self._failed(collective, _first_line(error)) from error
        collective.work = None
        collective.retired = True
        self._lanes.retire(self._lane, collective.sequence, waited_from)
        self._watch.done(collective.sequence)

    def _failed(self, collective: Collective, problem: str) -> CommunicationError:
        return self._watch.failure(collective.sequence, collective.signature, problem)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
