"""A lane of the CPU: the host waits until a collective is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.overlap.lane import ORDER, Collective, Lane, first_line, orders_differ
from axonn_ext.overlap.watch import POLL_SECONDS, Watch


class HostLane(Lane):
    """c10d's collectives on CPU tensors, which run on threads of c10d's."""

    capturing = False
    _check: tuple[Collective, torch.Tensor] | None = None

    def start_check(self) -> None:
        """See `Lane`."""
        self.settle()
        own = torch.tensor([self._watch.digest])
        digests = torch.empty(self.axis.size, dtype=own.dtype)
        self._check = self.all_gather(digests, own, ORDER), digests

    def settle(self) -> None:
        """See `Lane`."""
        if self._check is None:
            return
        (check, digests), self._check = self._check, None
        check.wait()
        if (digests != digests[self.axis.rank]).any():
            raise orders_differ(check)

    def _start(
        self, signature: str, sequence: int, tensors: tuple[Tensor, ...],
        start: Callable[[], dist.Work],
    ) -> Collective:  # fmt: skip
        return _OnHost(
            signature, sequence, self._watch, lanes=self._lanes, lane=self._lane, work=start()
        )


class _OnHost(Collective):
    def __init__(
        self, signature: str, sequence: int, watch: Watch, *, lanes: _C.Lanes, lane: int,
        work: dist.Work,
    ) -> None:  # fmt: skip
        super().__init__(signature, sequence, watch)
        self._lanes, self._lane = lanes, lane
        self._work: dist.Work | None = work
        self._done = threading.Event()
        work.get_future().add_done_callback(self._finished)

    def wait(self) -> None:
        """See `Collective`."""
        if self.retired:
            return
        waited_from = self._lanes.now()
        deadline = time.monotonic() + self._watch.timeout_s
        # The first look is short; from then on a failure of another rank ends the wait, too.
        while not self._done.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                raise self.took_too_long()
            if self._watch.someone_failed() and not self._done.wait(POLL_SECONDS):
                raise self.failed("given up, since another rank has failed")
        assert self._work is not None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self.failed(first_line(error)) from error
        self._work = None
        self.retired = True
        self._lanes.retire(self._lane, self.sequence, waited_from)
        self._watch.done(self.sequence)

    def _finished(self, _: torch.futures.Future[object]) -> None:
        self._lanes.finished(self._lane, self.sequence)
        self._done.set()
