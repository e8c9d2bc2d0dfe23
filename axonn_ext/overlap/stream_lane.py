"""A lane of a GPU: streams wait for collectives, and the host for nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import _C
from axonn_ext.grid import AxisGroup
from axonn_ext.overlap.clock import StreamClock
from axonn_ext.overlap.lane import ORDER, Collective, Lane, first_line, orders_differ
from axonn_ext.overlap.watch import POLL_SECONDS, Watch

_SLEEP_SECONDS = 2e-4
_MANY = 256  # collectives whose times have not been read yet


@dataclass(frozen=True)
class _Check:
    """What a step has found out about the order of collectives; the host reads it a step later."""

    collective: Collective
    differs: Tensor  # in pinned memory, there once `copied` is
    copied: torch.Event


class StreamLane(Lane):
    """c10d's collectives on a GPU's tensors, in a stream of the lane's own.

    A collective starts when the stream that is current at its start has come that far, and the one
    before it is done; `wait` makes the stream that is current then wait. A tensor that a collective
    uses is kept until it is waited for, and belongs to the stream that was current at the start.
    Works while a CUDA graph is captured, but tells no times then and compares no orders. `gpu` is
    torch.cuda.
    """

    def __init__(
        self, axis: AxisGroup, lanes: _C.Lanes, watch: Watch, *, device: torch.device,
        gpu: Any = torch.cuda,
    ) -> None:  # fmt: skip
        super().__init__(axis, lanes, watch)
        self._gpu, self._device = gpu, device
        self._stream = gpu.Stream(device, priority=-1)
        self._clock = StreamClock(device, gpu)
        self._without_times: deque[_InStream] = deque()
        self._check: _Check | None = None

    @property
    def totals(self) -> _C.LaneTotals:
        """Of what the GPU has come to so far."""
        self._read_times()
        return super().totals

    def take_records(self) -> list[_C.LaneTask]:
        self._read_times()
        return super().take_records()

    def check_order(self) -> None:
        """See `Lane`. Raises what the check of the step before has found: the host waits for that
        one only, so that it can be a step ahead."""
        if self._gpu.is_current_stream_capturing():
            return
        if self._check is not None:
            wait_on_host(self._check.copied, self._check.collective, self._watch)
            if self._check.differs:
                raise orders_differ(self._check.collective)
        own = torch.full((1,), self._watch.digest, dtype=torch.int64, device=self._device)
        digests = own.new_empty(self.axis.size)
        check = self.all_gather(digests, own, ORDER)
        check.wait()
        differs = (digests != own).any().to("cpu", non_blocking=True)
        copied = self._clock.mark(self._gpu.current_stream(self._device))
        self._check = _Check(check, differs, copied)
        self._read_times()

    def _start(
        self, signature: str, sequence: int, tensors: tuple[Tensor, ...],
        start: Callable[[], dist.Work],
    ) -> Collective:  # fmt: skip
        if len(self._without_times) >= _MANY:
            self._read_times()
        current = self._gpu.current_stream(self._device)
        capturing = self._gpu.is_current_stream_capturing()
        collective = _InStream(
            signature, sequence, self._watch, gpu=self._gpu, device=self._device,
            clock=None if capturing else self._clock, tensors=tensors,
        )  # fmt: skip
        self._stream.wait_stream(current)
        collective.run(self._stream, start)
        if capturing:
            now = self._lanes.now()
            self._lanes.retire_measured(
                self._lane, sequence, submitted=now, finished=now, waited_from=now, waited_to=now
            )
        else:
            self._without_times.append(collective)
        return collective

    def _read_times(self) -> None:
        """Hands on the times of what is over, in order."""
        if self._gpu.is_current_stream_capturing():
            return
        while self._without_times and (times := self._without_times[0].times()) is not None:
            sequence = self._without_times.popleft().sequence
            self._lanes.retire_measured(self._lane, sequence, **times)


class _InStream(Collective):
    """`clock`: None while a graph is captured."""

    def __init__(
        self, signature: str, sequence: int, watch: Watch, *, gpu: Any, device: torch.device,
        clock: StreamClock | None, tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        super().__init__(signature, sequence, watch)
        self._gpu, self._device, self._clock = gpu, device, clock
        self._tensors = tensors
        self._issued_on = gpu.current_stream(device)
        self._marks: dict[str, torch.Event] = {}

    def run(self, stream: torch.Stream, start: Callable[[], dist.Work]) -> None:
        """Gives the collective to the lane's stream."""
        with self._gpu.stream(stream):
            self._mark("submitted", stream)
            start().wait()  # the stream does, not the host
            self._mark("finished", stream)
            self._done = self._gpu.Event()
            self._done.record(stream)

    def wait(self) -> None:
        """See `Collective`; errors of the network end the process, by c10d's watchdog."""
        if self.retired:
            return
        current = self._gpu.current_stream(self._device)
        self._mark("waited_from", current)
        current.wait_event(self._done)
        if current != self._issued_on:  # whose memory it is
            self._issued_on.wait_event(self._done)
        self._mark("waited_to", current)
        self._tensors = ()
        self.retired = True
        if self._watch.compares and self._clock is not None:
            wait_on_host(self._done, self, self._watch)
            self._watch.done(self.sequence)

    def times(self) -> dict[str, float] | None:
        """In seconds of `_C.Lanes.now`; None where they are not known yet."""
        if not self.retired or not self._marks["waited_to"].query():
            return None
        assert self._clock is not None
        return {name: self._clock.seconds(mark) for name, mark in self._marks.items()}

    def _mark(self, name: str, stream: torch.Stream) -> None:
        if self._clock is not None:
            self._marks[name] = self._clock.mark(stream)


def wait_on_host(event: torch.Event, collective: Collective, watch: Watch) -> None:
    """Returns once the GPU has come to the event.

    Raises: CommunicationError for `collective` after AXONN_TIMEOUT_SECONDS, or once a peer failed.
    """
    began = looked = time.monotonic()
    try:
        while not event.query():
            now = time.monotonic()
            if now - began > watch.timeout_s:
                raise collective.took_too_long()
            if now - looked > POLL_SECONDS:
                looked = now
                if watch.someone_failed() and not event.query():
                    raise collective.failed("given up, since another rank has failed")
            time.sleep(_SLEEP_SECONDS)
    except torch.AcceleratorError as error:
        raise collective.failed(first_line(error)) from error
