"""Describes the collectives of a group, and how many bytes a rank sends in them.

A description says what data must cross ranks, not how: for a fused op, it lists the collective that
a separate matmul and collective would issue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ONE_PASS = ("reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
# c10d accumulates in the tensors' own dtype. On the CPU, csrc/ops/composed/c10d_collectives.cpp
# therefore casts tensors of these dtypes to fp32 before a sum.
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_C10D_ALGORITHMS = ("sequential", "chunked")


@dataclass(frozen=True)
class Collective:
    """One collective of one group.

    num_elements: the elements that a rank passes in (for gather and scatter: one rank's part).
    dtype: the dtype in which the data crosses ranks.
    """

    kind: str
    group_name: str
    group_size: int
    num_elements: int
    dtype: torch.dtype

    @property
    def bytes_per_rank(self) -> int:
        """The bytes that a rank sends in the bandwidth-optimal algorithm.

        If ranks send different amounts, this is their mean. It is rounded up to whole elements.
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
        # A recv is counted by the rank that sends; a barrier has no data.
        assert self.kind in ("recv", "barrier"), self.kind
        return 0


class Group(NamedTuple):
    """The process group and the algorithm in the arguments of a call."""

    name: str
    size: int
    algorithm: str

    def all_gather(self, shard: Tensor) -> Collective:
        return Collective("all_gather", self.name, self.size, shard.numel(), shard.dtype)

    def sum(self, kind: str, num_elements: int, like: Tensor) -> Collective:
        """Returns a "reduce_scatter" or "all_reduce" of elements with the dtype of `like`."""
        wide = self.algorithm in _C10D_ALGORITHMS and like.dtype in _LOW_PRECISION
        crossing = torch.float32 if wide and like.device.type != "cuda" else like.dtype
        return Collective(kind, self.name, self.size, num_elements, crossing)
