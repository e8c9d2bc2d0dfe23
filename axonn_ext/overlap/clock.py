"""Measures, on the host's clock, when streams of a GPU reach an event."""

from __future__ import annotations

from typing import Any

import torch

from axonn_ext import _C


class StreamClock:
    """Converts the times of events on a GPU's streams into seconds of `_C.Lanes.now`.

    Both clocks are read together once; the host waits for that. A GPU reports times as fp32
    differences from a base event, so the base should not lie hours before the events. `gpu` is
    torch.cuda, or a substitute in tests.
    """

    def __init__(self, device: torch.device, gpu: Any = torch.cuda) -> None:
        self._gpu = gpu
        self._base = self.mark(gpu.current_stream(device))
        self._base.synchronize()
        self._origin = _C.Lanes.now()

    def mark(self, stream: torch.Stream) -> torch.Event:
        """Returns an event after all the work that the stream has been given so far."""
        event: torch.Event = self._gpu.Event(enable_timing=True)
        event.record(stream)
        return event

    def rebase(self, mark: torch.Event) -> None:
        """Makes a mark that the GPU has passed the new base."""
        self._origin, self._base = self.seconds(mark), mark

    def seconds(self, mark: torch.Event) -> float:
        """Returns the time at which the stream passed the mark, which must have happened."""
        return self._origin + self._base.elapsed_time(mark) * 1e-3
