"""The lane for a GPU, in which streams, not the host, wait for the collectives of a step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonn_ext import _C
from axonn_ext.overlap.busy_sms import BusySms
from axonn_ext.overlap.clock import StreamClock
from axonn_ext.overlap.lane import ORDER, Collective, Lane, first_line, orders_differ
from axonn_ext.overlap.transport import Started, Transport
from axonn_ext.overlap.watch import POLL_SECONDS, CommunicationError, Watch
from axonn_ext.ranks.grid import AxisGroup

_SLEEP_SECONDS = 2e-4
_MANY = 256  # the lane reads times once this many collectives have unread ones


class StreamLane(Lane):
    """Runs collectives on tensors of a GPU, ordered by the lane's own stream.

    A collective runs once the one before it is done and the stream that was current at its start
    has finished the work enqueued by then. `wait` makes the stream that is current at that call
    wait. The tensors of a collective belong to the stream that was current at its start. Their
    memory is not reused before the collective is done, even if nobody waits for it. The lane works
    while a CUDA graph is captured, but then measures no times and compares nothing. `gpu` is
    torch.cuda, or a substitute in tests.
    """

    def __init__(
        self, axis: AxisGroup, lanes: _C.Lanes, watch: Watch, *, transport: Transport,
        device: torch.device, busy: BusySms, gpu: Any = torch.cuda,
    ) -> None:  # fmt: skip
        super().__init__(axis, lanes, watch, transport)
        self._gpu, self._device, self._busy = gpu, device, busy
        self._stream = gpu.Stream(device)
        self._clock = StreamClock(device, gpu)
        self._unread: deque[tuple[int, _Marks]] = deque()  # (sequence number, its unread times)
        self._last_finished = 0.0
        self._check: _Check | None = None

    @property
    def capturing(self) -> bool:
        return bool(self._gpu.is_current_stream_capturing())

    @property
    def totals(self) -> _C.LaneTotals:
        """The totals of the collectives that the GPU has finished so far."""
        self._read_times()
        return super().totals

    def take_records(self) -> list[_C.LaneTask]:
        self._read_times()
        return super().take_records()

    def start_check(self) -> None:
        """See `Lane`."""
        if self.capturing:
            return
        self.settle()
        own = torch.full((1,), self._watch.digest, dtype=torch.int64, device=self._device)
        digests = own.new_empty(self.axis.size)
        check = self.all_gather(digests, own, ORDER)
        assert isinstance(check, _InStream)
        check.wait()
        differs = (digests != own).any().to("cpu", non_blocking=True)
        copied = self._clock.mark(self._gpu.current_stream(self._device))
        self._check = _Check(check, differs, copied)
        self._read_times()

    def settle(self) -> None:
        """See `Lane`."""
        if self._check is None or self.capturing:
            return
        check, self._check = self._check, None
        check.collective.wait_on_host(check.copied)
        if check.differs:
            raise orders_differ(check.collective)

    def _start(
        self, signature: str, sequence: int, tensors: tuple[Tensor, ...],
        start: Callable[[], Started], *, sent_bytes: int,
    ) -> Collective:  # fmt: skip
        if len(self._unread) >= _MANY:
            self._read_times()
        current = self._gpu.current_stream(self._device)
        marks = _Marks(None if self.capturing else self._clock)
        self._stream.wait_stream(current)
        with self._gpu.stream(self._stream):
            marks.set("submitted", self._stream)
            start().wait()  # the lane's stream waits, not the host
            marks.set("finished", self._stream)
            done = self._gpu.Event()
            done.record(self._stream)
        self._unread.append((sequence, marks))
        if marks.timed:
            self._busy.look()
        self._busy.started(self.axis.axis, done, is_captured=not marks.timed)
        return _InStream(
            signature, sequence, self._watch, gpu=self._gpu, device=self._device, issued_on=current,
            runs_on=self._stream, done=done, marks=marks, tensors=tensors,
            transport=self._transport, busy=self._busy,
        )  # fmt: skip

    def _read_times(self) -> None:
        """Passes the times of finished collectives to the recorder, in order."""
        if self.capturing:
            return
        newest = None
        while self._unread and self._unread[0][1].are_known():
            sequence, marks = self._unread.popleft()
            times = marks.times(self._last_finished)
            self._last_finished = max(self._last_finished, times["finished"])
            self._lanes.retire_measured(self._lane, sequence, **times)
            newest = marks.get("finished") or newest
        if newest is not None:
            self._clock.rebase(newest)


class _InStream(Collective):
    """A collective on the lane's stream; the event `done` marks its end."""

    def __init__(
        self, signature: str, sequence: int, watch: Watch, *, gpu: Any, device: torch.device,
        issued_on: torch.Stream, runs_on: torch.Stream, done: torch.Event, marks: _Marks,
        tensors: tuple[Tensor, ...], transport: Transport, busy: BusySms,
    ) -> None:  # fmt: skip
        super().__init__(signature, sequence, watch)
        self._transport, self._busy = transport, busy
        self._gpu, self._device = gpu, device
        self._issued_on, self._runs_on = issued_on, runs_on
        self._done, self._marks, self._tensors = done, marks, tensors
        self._readers: list[torch.Stream] = []

    def wait(self) -> None:
        """See `Collective`. On c10d's groups, a network error ends the process.

        Raises: RuntimeError if the collective was started outside the capture of a CUDA graph and
            is awaited inside, or the reverse.
        """
        if self._gpu.is_current_stream_capturing() is self._marks.timed:
            raise RuntimeError(
                f"{self.signature}: started outside the CUDA graph that uses it, or the reverse; "
                "call Orchestrator.end_step() before a capture and at its end"
            )
        current = self._gpu.current_stream(self._device)
        if current in self._readers:
            return
        if not self._readers:
            self._marks.set("waited_from", current)
        current.wait_event(self._done)
        self._readers.append(current)
        self._busy.awaited(self._watch.axis, self._done)
        if self._marks.timed:
            self._busy.look()
        if current != self._issued_on:
            # The tensors' memory belongs to `_issued_on`, which must not use it again before the
            # collective is done.
            self._issued_on.wait_event(self._done)
            for tensor in self._tensors:
                tensor.record_stream(current)
        if self._watch.compares and self._marks.timed and not self.retired:
            self.wait_on_host(self._done)
            self._watch.done(self.sequence)
        self.retired = True

    def wait_on_host(self, event: torch.Event) -> None:
        """Waits until the GPU has passed an event after the collective, and looks for failures.

        Raises: CommunicationError after AXONN_TIMEOUT_SECONDS, or if a peer or NCCL has failed.
        """
        began = time.monotonic()
        try:
            while not event.query():
                if time.monotonic() - began > POLL_SECONDS:
                    with self._watch.noted_wait(self.sequence, self.signature, POLL_SECONDS):
                        self._wait_for_long(event)
                time.sleep(_SLEEP_SECONDS)
            self._transport.check()  # an aborted collective ends, too, but its results are invalid
        except CommunicationError:
            raise
        except RuntimeError as error:  # of a GPU, too
            raise self.failed(first_line(error)) from error

    def _wait_for_long(self, event: torch.Event) -> None:
        began = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - began > self._watch.timeout_s - POLL_SECONDS:
                raise self.took_too_long()
            if now - looked > POLL_SECONDS:
                looked = now
                self._transport.check()
                if self._watch.someone_failed() and not event.query():
                    raise self.failed("given up, since another rank has failed")
            time.sleep(_SLEEP_SECONDS)

    def __del__(self) -> None:
        """Orders the collective before the next use of its tensors' memory.

        `wait` has done so already. For a collective that nobody has waited for, the stream that
        owns the memory waits now, or the allocator learns of the lane's stream.
        """
        if self._readers or sys.is_finalizing():
            return
        self._marks.dropped = True
        with self._gpu.stream(self._issued_on):
            capturing = bool(self._gpu.is_current_stream_capturing())
        if capturing is not self._marks.timed:
            self._issued_on.wait_event(self._done)
        elif capturing:
            # A capturing stream cannot wait for work that was started before the capture.
            for tensor in self._tensors:
                tensor.record_stream(self._runs_on)
        # The memory of a collective in a finished capture belongs to the graph.


class _Marks:
    """The events that mark the times of a collective.

    There are none (and no clock) for a collective that is captured into a CUDA graph.

    dropped: nobody will wait for the collective any more. It is then recorded as if it had been
        done before the wait.
    """

    def __init__(self, clock: StreamClock | None) -> None:
        self.dropped = False
        self._clock = clock
        self._events: dict[str, torch.Event] = {}

    @property
    def timed(self) -> bool:
        return self._clock is not None

    def set(self, name: str, stream: torch.Stream) -> None:
        if self._clock is not None:
            self._events[name] = self._clock.mark(stream)

    def get(self, name: str) -> torch.Event | None:
        return self._events.get(name)

    def are_known(self) -> bool:
        if self._clock is None:
            return True
        is_over = self.dropped or "waited_from" in self._events
        return is_over and all(event.query() for event in self._events.values())

    def times(self, without: float) -> dict[str, float]:
        """Returns the times in seconds of `_C.Lanes.now`; without a clock, all are `without`."""
        if self._clock is None:
            return dict.fromkeys(("submitted", "finished", "waited_from", "waited_to"), without)
        times = {name: self._clock.seconds(event) for name, event in self._events.items()}
        times.setdefault("waited_from", times["finished"])
        return {**times, "waited_to": max(times["waited_from"], times["finished"])}


@dataclass(frozen=True)
class _Check:
    """A check of the order of collectives, whose result the host reads later."""

    collective: _InStream
    differs: Tensor  # in pinned memory; valid once the GPU has passed `copied`
    copied: torch.Event
