"""How the ranks of the data axis exchange the parts of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid

# Waits for a started collective and returns its result.
Pending = Callable[[], Tensor]


class Exchange(Protocol):
    """Collectives over the axes of a grid, started in the order of the calls."""

    def all_reduce(self, flat: Tensor, axis: str, what: str) -> Pending:
        """Sums a tensor, which may be overwritten, over an axis."""
        ...

    def reduce_scatter(self, flat: Tensor, what: str) -> Pending:
        """Returns this rank's part of the sum over data, accumulated in fp32 (fp64 for fp64)."""
        ...

    def all_gather(self, part: Tensor, what: str) -> Pending:
        """Returns the parts of all ranks of data, in rank order."""
        ...

    def first_difference(self, numbers: list[int]) -> int | None:
        """Returns the first index at which ranks of data have different numbers; None: nowhere.

        An exchange that compares its collectives otherwise returns None.
        """
        ...


class BlockingExchange:
    """Exchanges immediately, without overlap."""

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self._grid, self._device = grid, device

    def all_reduce(self, flat: Tensor, axis: str, what: str) -> Pending:
        return _there(collectives.all_reduce(flat, self._grid.axis(axis)))

    def reduce_scatter(self, flat: Tensor, what: str) -> Pending:
        return _there(collectives.reduce_scatter(flat, self._grid.axis("data")))

    def all_gather(self, part: Tensor, what: str) -> Pending:
        return _there(collectives.all_gather(part, self._grid.axis("data")))

    def first_difference(self, numbers: list[int]) -> int | None:
        axis = self._grid.axis("data")
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        every = collectives.all_gather(own, axis).view(axis.size, -1)
        if isinstance(every, FakeTensor):  # has no values
            return None
        (places,) = (every != every[0]).any(0).cpu().nonzero(as_tuple=True)
        return int(places[0]) if len(places) else None


def _there(result: Tensor) -> Pending:
    return lambda: result
