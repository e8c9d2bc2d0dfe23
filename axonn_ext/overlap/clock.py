"""Times of a GPU's streams, on the clock of the host."""

from __future__ import annotations

from typing import Any

import torch

from axonn_ext import _C


class StreamClock:
    """Turns events of a GPU's streams into seconds of `_C.Lanes.now`.

    Both clocks are read together once, for which the host waits. A GPU's times are differences in
    fp32, so the marks that are asked for should not lie hours behind the base. `gpu` is torch.cuda.
    """

    def __init__(self, device: torch.device, gpu: Any = torch.cuda) -> None:
        self._gpu = gpu
        self._base = self.mark(gpu.current_stream(device))
        self._base.synchronize()
        self._origin = _C.Lanes.now()

    def mark(self, stream: torch.Stream) -> torch.Event:
        """An event after everything that the stream has been given so far."""
        event: torch.Event = self._gpu.Event(enable_timing=True)
        event.record(stream)
        return event

    def rebase(self, mark: torch.Event) -> None:
        """Counts from a mark that the GPU has come to."""
        self._origin, self._base = self.seconds(mark), mark

    def seconds(self, mark: torch.Event) -> float:
        """When the stream came to the mark; it must have."""
        return self._origin + self._base.elapsed_time(mark) * 1e-3
