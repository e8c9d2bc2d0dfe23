"""Tells the fused ops of a GPU how many SMs concurrent collectives occupy."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import torch

from axonn_ext import _C

NCCL_SMS = 24
"""The CTAs of an NCCL collective without a limit, between Hopper GPUs on NVLink. A guess."""


class BusySms:
    """The SMs that the collectives of an orchestrator's lanes take while they may be running.

    A lane runs one collective at a time. It counts as running from the start of a collective until
    the GPU has passed the last one, or until the current stream waits for it. Fused ops called in
    the meantime leave that number of SMs free (AXONN_FUSED_FREE_SMS).

    sms: the SMs that one collective takes.
    """

    def __init__(self, device: torch.device, *, sms: int) -> None:
        self._sms = sms
        self._add = partial(_C.add_busy_sms, device.index or 0)  # at the interpreter's end, too
        self._lanes: dict[str, deque[_Running]] = {}

    def started(self, axis: str, done: torch.Event, *, is_captured: bool) -> None:
        """Notes that the axis's lane has a collective that ends at the event."""
        running = self._lanes.setdefault(axis, deque())
        if not running:
            self._add(self._sms)
        running.append(_Running(done, is_captured))

    def awaited(self, axis: str, done: torch.Event) -> None:
        """Notes that the current stream waits for the event, and so for all before it."""
        running = self._lanes.get(axis, deque())
        if any(item.done is done for item in running):
            while running.popleft().done is not done:
                pass
            self._released(running)

    def look(self) -> None:
        """Forgets collectives that the GPU has finished. Must not be called during a capture."""
        for running in self._lanes.values():
            if not running:
                continue
            # Events recorded during a capture belong to the graph and cannot be queried.
            while running and (running[0].is_captured or running[0].done.query()):
                running.popleft()
            self._released(running)

    def _released(self, running: deque[_Running]) -> None:
        if not running:
            self._add(-self._sms)

    def __del__(self) -> None:
        for running in self._lanes.values():
            if running:
                self._add(-self._sms)


class _Running(NamedTuple):
    done: torch.Event
    is_captured: bool
