"""What crosses ranks: a collective of a group, and how many bytes a rank sends in it.

It says what must cross ranks, not by which route: a fused op issues what the unfused pair would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ONE_PASS = ("reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
# c10d adds in the tensor's own dtype, so csrc/ops/composed/c10d_collectives.cpp makes it add these
# in fp32, save on GPUs.
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_C10D_ALGORITHMS = ("sequential", "chunked")


@dataclass(frozen=True)
class Collective:
    """One collective of one group.

    num_elements: of what a rank passes in (gather, scatter: of one rank's part). dtype: of what
    crosses ranks.
    """

    kind: str
    group_name: str
    group_size: int
    num_elements: int
    dtype: torch.dtype

    @property
    def bytes_per_rank(self) -> int:
        """What a rank sends in the algorithm that moves least; the ranks' mean where they differ.

        In whole elements, rounded up where the group's size does not divide them.
        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009.
        """
        return self._elements_sent() * self.dtype.itemsize

    def _elements_sent(self) -> int:
        n, g = self.num_elements, self.group_size
        if self.kind == "all_gather":
            return (g - 1) * n
        if self.kind == "all_reduce":
            return -(-2 * (g - 1) * n // g)
        if self.kind in _ONE_PASS:
            return -(-(g - 1) * n // g)
        if self.kind == "send":
            return n
        assert self.kind in ("recv", "barrier"), self.kind  # counted where it is sent; no data
        return 0


class Group(NamedTuple):
    """A process group as an op's arguments give it, with the algorithm of the call."""

    name: str
    size: int
    algorithm: str

    def all_gather(self, shard: Tensor) -> Collective:
        return Collective("all_gather", self.name, self.size, shard.numel(), shard.dtype)

    def sum(self, kind: str, num_elements: int, like: Tensor) -> Collective:
        """A "reduce_scatter" or "all_reduce" of so many elements, of the dtype of `like`."""
        wide = self.algorithm in _C10D_ALGORITHMS and like.dtype in _LOW_PRECISION
        crossing = torch.float32 if wide and like.device.type != "cuda" else like.dtype
        return Collective(kind, self.name, self.size, num_elements, crossing)
