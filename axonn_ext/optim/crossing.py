"""Transfers gradients from the device to the host, and updated values back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Values = list[Tensor | None]  # of the runs of a bucket; None: no gradient


class Crossing(Protocol):
    """Transfers the buckets of a step, each in one of its slots.

    slots: number of buckets that are transferred or updated at a time.

    Transfers start after all work queued on the device before. The source memory must stay valid
    until the host has waited for it (gradients), or the device (values).
    """

    slots: int

    def to_host(self, slot: int, values: Values) -> Callable[[], Values]:
        """Starts to copy gradients to the host. The result waits for them and returns them."""
        ...

    def targets(self, slot: int, places: Sequence[Tensor]) -> list[Tensor]:
        """Returns host memory for the values that will go to these places on the device.

        It may be written once the function returned by `to_host` has returned.
        """
        ...

    def to_device(self, slot: int, places: Sequence[Tensor]) -> None:
        """Starts to copy the targets of the slot to these places."""
        ...

    def arrived(self) -> None:
        """Makes the device wait for all copies to it so far."""
        ...


class NoCrossing:
    """For a device that is the host: gradients and parameters are used in place."""

    slots = 1

    def to_host(self, slot: int, values: Values) -> Callable[[], Values]:
        return lambda: values

    def targets(self, slot: int, places: Sequence[Tensor]) -> list[Tensor]:
        return list(places)

    def to_device(self, slot: int, places: Sequence[Tensor]) -> None:
        pass

    def arrived(self) -> None:
        pass


class StreamCrossing:
    """Transfers through pinned memory, on two streams of a GPU, one for each direction.

    `gpu` is torch.cuda, or a substitute in tests. numel: of the largest part of a bucket.
    """

    slots = 2  # while one bucket is updated, the next one crosses

    def __init__(
        self, device: torch.device, dtype: torch.dtype, numel: int, gpu: Any = torch.cuda
    ) -> None:
        self._gpu, self._device = gpu, device
        self._down, self._up = gpu.Stream(device), gpu.Stream(device)
        self._gradients = [self._pinned(numel, dtype) for _ in range(self.slots)]
        self._results = [self._pinned(numel, dtype) for _ in range(self.slots)]
        # Events: the results of a slot have arrived on the device.
        self._left: list[Any] = [None] * self.slots

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._gpu is torch.cuda)

    def to_host(self, slot: int, values: Values) -> Callable[[], Values]:
        copies: Values = []
        at = 0
        self._down.wait_stream(self._gpu.current_stream(self._device))
        with self._gpu.stream(self._down):
            for value in values:
                if value is None:
                    copies.append(None)
                    continue
                copy = self._gradients[slot][at : at + value.numel()]
                copies.append(copy.copy_(value, non_blocking=True))
                at += value.numel()
            there = self._gpu.Event(blocking=True)
            there.record(self._down)
        before = self._left[slot]

        # Otherwise memory of a gradient with no other owner would be reused before it is read.
        def wait(_: Values = values) -> Values:
            there.synchronize()
            if before is not None:
                before.synchronize()
            return copies

        return wait

    def targets(self, slot: int, places: Sequence[Tensor]) -> list[Tensor]:
        sizes = [place.numel() for place in places]
        return list(self._results[slot][: sum(sizes)].split(sizes))

    def to_device(self, slot: int, places: Sequence[Tensor]) -> None:
        self._up.wait_stream(self._gpu.current_stream(self._device))
        with self._gpu.stream(self._up):
            for place, value in zip(places, self.targets(slot, places), strict=True):
                place.copy_(value, non_blocking=True)
            left = self._gpu.Event(blocking=True)
            left.record(self._up)
        self._left[slot] = left

    def arrived(self) -> None:
        self._gpu.current_stream(self._device).wait_stream(self._up)
