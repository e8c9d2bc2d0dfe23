"""Runs ZeRO's collectives on the lanes of an orchestrator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from axonn_ext.optim.zero.exchange import Exchange, Pending
from axonn_ext.overlap.lane import Lane
from axonn_ext.overlap.sums import sum_of_blocks


class LaneExchange:
    """An Exchange whose collectives overlap computation; see axonn_ext.optim.zero.exchange.

    Ranks exchange blocks in the gradients' dtype, and each rank adds those that it receives in rank
    order, so the sums are repeatable. other: for axes without a lane. No gradient of the
    orchestrator's module is summed over them, but one of another module of the same optimizer may
    be.
    """

    def __init__(self, lanes: Mapping[str, Lane], other: Exchange) -> None:
        self._lanes, self._other = lanes, other

    def all_reduce(self, flat: Tensor, axis: str, what: str) -> Pending:
        if axis not in self._lanes:
            return self._other.all_reduce(flat, axis, what)
        collective = self._lanes[axis].all_reduce(flat, what)

        def result() -> Tensor:
            collective.wait()
            return flat

        return result

    def reduce_scatter(self, flat: Tensor, what: str) -> Pending:
        """See Exchange. Raises RuntimeError while a CUDA graph is captured.

        The replay of a graph would leave no record of its sums.
        """
        lane, blocks = self._lanes["data"], torch.empty_like(flat)
        if lane.capturing:
            raise RuntimeError("ZeRO: a CUDA graph cannot capture sums in parts; use zero=0")
        collective = lane.all_to_all(blocks, flat, what)

        def result(_: Tensor = flat) -> Tensor:  # the collective reads it
            collective.wait()
            return sum_of_blocks(blocks, lane.axis.size)

        return result

    def all_gather(self, part: Tensor, what: str) -> Pending:
        lane = self._lanes["data"]
        whole = part.new_empty(part.numel() * lane.axis.size)
        collective = lane.all_gather(whole, part, what)

        def result(_: Tensor = part) -> Tensor:
            collective.wait()
            return whole

        return result

    def first_difference(self, numbers: list[int]) -> int | None:
        """Returns None: lanes already compare their collectives, including those of gradients."""
        return None
