"""Which collectives each op issues, computed from its arguments alone.

One function an op, with the parameters of its schema, as the fakes have. They say what must cross
ranks, not by which route: a fused op issues what the unfused pair would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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


class _Group(NamedTuple):
    name: str
    size: int
    algorithm: str

    def all_gather(self, shard: Tensor) -> Collective:
        return Collective("all_gather", self.name, self.size, shard.numel(), shard.dtype)

    def sum(self, kind: str, num_elements: int, like: Tensor) -> Collective:
        wide = self.algorithm in _C10D_ALGORITHMS and like.dtype in _LOW_PRECISION
        crossing = torch.float32 if wide and like.device.type != "cuda" else like.dtype
        return Collective(kind, self.name, self.size, num_elements, crossing)


def _all_gather(
    shard: Tensor, dim: int, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    yield _Group(group_name, group_size, algorithm).all_gather(shard)


def _reduce_scatter(
    input: Tensor, dim: int, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    group = _Group(group_name, group_size, algorithm)
    yield group.sum("reduce_scatter", input.numel(), input)


def _all_reduce(
    input: Tensor, reduce_op: str, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    group = _Group(group_name, group_size, algorithm)
    yield group.sum("all_reduce", input.numel(), input)


def _all_gather_matmul(
    a_shard: Tensor, b: Tensor, gather_dim: int, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    yield _Group(group_name, group_size, algorithm).all_gather(a_shard)


def _matmul_all_gather_rhs(
    a: Tensor, b_shard: Tensor, gather_dim: int, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    yield _Group(group_name, group_size, algorithm).all_gather(b_shard)


def _matmul_reduce_scatter(
    a: Tensor, b: Tensor, scatter_dim: int, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    group = _Group(group_name, group_size, algorithm)
    yield group.sum("reduce_scatter", a.shape[0] * b.shape[1], a)


def _matmul_all_reduce(
    a: Tensor, b: Tensor, group_name: str, group_size: int, algorithm: str
) -> Iterator[Collective]:
    group = _Group(group_name, group_size, algorithm)
    yield group.sum("all_reduce", a.shape[0] * b.shape[1], a)


def _linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_names: Sequence[str],
    group_sizes: Sequence[int],
    sharded: bool,
    gather_dim: int,
    scatter_dim: int,
    save_input: bool,
    save_weight: bool,
    algorithm: str,
) -> Iterator[Collective]:
    r, s, z, *_ = _groups(group_names, group_sizes, algorithm)
    yield z.all_gather(weight)
    rows = x.shape[0]
    if sharded:
        yield r.all_gather(x)
        rows *= r.size if gather_dim == 0 else 1
    product = rows * weight.shape[0] * z.size
    yield s.sum("reduce_scatter" if sharded else "all_reduce", product, x)


def _linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    x_is_full: bool,
    weight_is_full: bool,
    output_mask: Sequence[bool],
    group_names: Sequence[str],
    group_sizes: Sequence[int],
    sharded: bool,
    gather_dim: int,
    scatter_dim: int,
    algorithm: str,
) -> Iterator[Collective]:
    r, s, z, *_ = _groups(group_names, group_sizes, algorithm)
    rows, out_features = dy.shape
    in_features = weight.shape[1]
    if sharded:
        yield s.all_gather(dy)
        rows *= s.size if scatter_dim == 0 else 1
        out_features *= s.size if scatter_dim == 1 else 1
    if output_mask[0]:
        if not weight_is_full:
            yield z.all_gather(weight)
        yield r.sum("reduce_scatter" if sharded else "all_reduce", rows * in_features, dy)
    if output_mask[1]:
        if sharded and not x_is_full:
            yield r.all_gather(x)
        yield z.sum("reduce_scatter", out_features * in_features, dy)


def _groups(names: Sequence[str], sizes: Sequence[int], algorithm: str) -> list[_Group]:
    return [_Group(name, size, algorithm) for name, size in zip(names, sizes, strict=True)]


# By the op's name in torch.ops.axonn; groups of one rank included, which issue nothing.
COLLECTIVES_OF: Mapping[str, Callable[..., Iterator[Collective]]] = MappingProxyType(
    {
        "axonn::all_gather": _all_gather,
        "axonn::reduce_scatter": _reduce_scatter,
        "axonn::all_reduce": _all_reduce,
        "axonn::all_gather_matmul": _all_gather_matmul,
        "axonn::matmul_all_gather_rhs": _matmul_all_gather_rhs,
        "axonn::matmul_reduce_scatter": _matmul_reduce_scatter,
        "axonn::matmul_all_reduce": _matmul_all_reduce,
        "axonn::linear_forward": _linear_forward,
        "axonn::linear_backward": _linear_backward,
    }
)
