"""Sends what ZeRO exchanges through the lanes of an orchestrator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from axonn_ext.overlap.lane import Lane
from axonn_ext.overlap.sums import sum_of_blocks
from axonn_ext.zero.exchange import Pending


class LaneExchange:
    """An Exchange whose collectives run beside computation; see axonn_ext.zero.exchange.

    Ranks exchange blocks in the gradients' dtype, and each rank adds those that it receives in rank
    order, so the sums are repeatable.
    """

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes

    def all_reduce(self, flat: Tensor, axis: str, what: str) -> Pending:
        collective = self._lanes[axis].all_reduce(flat, what)

        def result() -> Tensor:
            collective.wait()
            return flat

        return result

    def reduce_scatter(self, flat: Tensor, what: str) -> Pending:
        lane, blocks = self._lanes["data"], torch.empty_like(flat)
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
