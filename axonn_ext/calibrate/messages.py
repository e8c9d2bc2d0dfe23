"""Messages between stages to time, sent and received by the threads of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.gpu import gpu_of
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import FORWARD, Message
from axonn_ext.pipeline.neighbours import Neighbours
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.side_groups import SideGroups
from axonn_ext.spec import settings


class Shift:
    """Passes messages along an axis: each rank sends to the next, the last to the first.

    Messages use the threads, groups and inbox of a pipeline, and so include their cost. All ranks
    must create their Shifts in the same order, and close them.
    """

    def __init__(self, axis: AxisGroup, device: torch.device) -> None:
        failures, gpu = Failures(settings.load().timeout_seconds), gpu_of(device)
        self._inbox = Inbox(axis, failures, gpu)
        self._neighbours = Neighbours(axis, self._inbox, failures, SideGroups(), gpu=gpu)
        self._own = Message(FORWARD, axis.rank, 0)
        self._next = Message(FORWARD, (axis.rank + 1) % axis.size, 0)

    def call(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Returns a call that sends the tensor and waits for the previous rank's."""
        return partial(self._pass_on, f"messages of {tensor.nbytes} bytes", tensor)

    def _pass_on(self, phase: str, tensor: torch.Tensor) -> torch.Tensor:
        # Messages of a phase have one shape, so each size is a separate phase.
        self._neighbours.expect(phase, [self._own])
        self._neighbours.send(phase, self._next, tensor)
        return self._inbox.take(self._own)

    def close(self) -> None:
        """Ends the threads."""
        self._neighbours.close()
