"""The lane for the CPU, in which the host waits until a collective is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.overlap.lane import ORDER, Collective, Lane, first_line, orders_differ
from axonn_ext.overlap.transport import C10dTransport, Started
from axonn_ext.overlap.watch import POLL_SECONDS, Watch
from axonn_ext.ranks.grid import AxisGroup


class HostLane(Lane):
    """Runs c10d's collectives on CPU tensors, in c10d's threads.

    On an emulated link (AXONN_EMULATED_LINKS) a collective ends when that link would have ended it.
    """

    capturing = False
    _check: tuple[Collective, torch.Tensor] | None = None

    def __init__(self, axis: AxisGroup, lanes: _C.Lanes, watch: Watch) -> None:
        super().__init__(axis, lanes, watch, C10dTransport(axis))
        self._link = _C.emulated_link(axis.name) if axis.size > 1 else None

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
        start: Callable[[], Started], *, sent_bytes: int,
    ) -> Collective:  # fmt: skip
        transfer = None
        if self._link is not None:
            submitted = self._lanes.now()
            transfer = _Transfer(self._link, self._link.begin(sent_bytes), submitted)
        work = start()
        assert isinstance(work, dist.Work)  # of c10d
        return _OnHost(
            signature, sequence, self._watch, lanes=self._lanes, lane=self._lane, work=work,
            transfer=transfer,
        )  # fmt: skip


class _Transfer(NamedTuple):
    """The transfer of one collective over an emulated link."""

    link: _C.EmulatedLink
    number: int
    submitted: float


class _OnHost(Collective):
    def __init__(
        self, signature: str, sequence: int, watch: Watch, *, lanes: _C.Lanes, lane: int,
        work: dist.Work, transfer: _Transfer | None,
    ) -> None:  # fmt: skip
        super().__init__(signature, sequence, watch)
        self._lanes, self._lane, self._transfer = lanes, lane, transfer
        self._work: dist.Work | None = work
        self._done = threading.Event()
        work.get_future().add_done_callback(self._finished)

    def wait(self) -> None:
        """See `Collective`."""
        if self.retired:
            return
        waited_from = self._lanes.now()
        if not self._done.wait(POLL_SECONDS):
            with self._watch.noted_wait(self.sequence, self.signature, POLL_SECONDS):
                self._wait_for_long()
        assert self._work is not None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self.failed(first_line(error)) from error
        self._work = None
        self.retired = True
        if self._transfer is None:
            self._lanes.retire(self._lane, self.sequence, waited_from)
        else:
            self._pass_link(self._transfer, waited_from)
        self._watch.done(self.sequence)

    def _wait_for_long(self) -> None:
        deadline = time.monotonic() + self._watch.timeout_s - POLL_SECONDS
        while not self._done.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                raise self.took_too_long()
            # If another rank has failed, this rank checks once more before it gives up.
            if self._watch.someone_failed() and not self._done.wait(POLL_SECONDS):
                raise self.failed("given up, since another rank has failed")

    def _pass_link(self, transfer: _Transfer, waited_from: float) -> None:
        """Sleeps until the emulated link is done; the collective counts as finished only then."""
        finished = transfer.link.end(transfer.number)
        self._lanes.retire_measured(
            self._lane, self.sequence, submitted=transfer.submitted, finished=finished,
            waited_from=waited_from, waited_to=self._lanes.now(),
        )  # fmt: skip

    def _finished(self, _: torch.futures.Future[object]) -> None:
        if self._transfer is None:
            self._lanes.finished(self._lane, self.sequence)
        self._done.set()
