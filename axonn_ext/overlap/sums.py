"""Gradients summed over z as backward makes them, and over the other axes in buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.gradients import axes_left, in_buckets, split_like
from axonn_ext.nn.sharded import ShardedParameter
from axonn_ext.overlap.lane import Collective, Lane


@dataclass(eq=False)
class _Scatter:
    """A reduce-scatter over z: blocks from every rank, to be added up here."""

    p: ShardedParameter
    blocks: Tensor
    input: Tensor  # read by the collective
    collective: Collective


class ScatteredSums:
    """Gradients of gathered weights: reduce-scattered over z, at most `deferred` under way.

    Ranks exchange blocks in the gradients' dtype and each adds its own in rank order in fp32 (fp64
    for fp64), so the sum is repeatable, and the one that the fused ops make.
    """

    def __init__(self, lane: Lane, *, deferred: int) -> None:
        self._lane, self._deferred = lane, deferred
        self._under_way: deque[_Scatter] = deque()

    def start(self, p: ShardedParameter, gradient: Tensor) -> list[ShardedParameter]:
        """Starts the sum of one gradient [Gz * rows, ...]; returns the parameters that were done.

        A sum that is done has been added to its parameter's `grad`.
        """
        gradient = gradient.contiguous()
        blocks = torch.empty_like(gradient)
        collective = self._lane.all_to_all(blocks, gradient, f"{p.name}.grad")
        self._under_way.append(_Scatter(p, blocks, gradient, collective))
        return self._finish(self._deferred)

    def finish(self) -> list[ShardedParameter]:
        """Completes every sum; returns the parameters, those of several sums several times."""
        return self._finish(0)

    def discard(self) -> None:
        """Waits for every sum and drops it."""
        while self._under_way:
            self._under_way.popleft().collective.wait()

    def _finish(self, num_left: int) -> list[ShardedParameter]:
        done = []
        while len(self._under_way) > num_left:
            scatter = self._under_way.popleft()
            scatter.collective.wait()
            parameter = scatter.p.parameter
            total = _sum_of_blocks(scatter.blocks, self._lane.axis.size)
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
            done.append(scatter.p)
        return done


def _sum_of_blocks(blocks: Tensor, num_blocks: int) -> Tensor:
    first, *rest = blocks.chunk(num_blocks)
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = first.to(wide, copy=True)
    for block in rest:
        total += block
    return total.to(first.dtype)


# One crosses while the next one waits behind it: more would not keep an axis busier.
_MOST_BUCKETS = 2


@dataclass(eq=False)
class _Bucket:
    """Gradients on their way over one axis after the other."""

    parameters: list[ShardedParameter]
    dtype: torch.dtype  # of the gradients
    flat: Tensor  # all of them, in the dtype in which they are summed
    axes: list[str]  # that are left, the one being crossed first
    collective: Collective


class BucketedSums:
    """Gradients over the axes that are left after backward, in buckets that start once full.

    A gradient on its way is not in its parameter's `grad`; what backward adds meanwhile goes the
    same way later, and the sums are added: the result is right whenever a bucket starts. Sums of
    low-precision gradients are made, and sent, in fp32: two buckets take memory for that at a time,
    since a bucket starts only when the last but one is summed, and back in the gradients' dtype.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, bucket_bytes: int) -> None:
        self._lanes, self._bucket_bytes = lanes, bucket_bytes
        # By axes and dtype, since only gradients that have both in common go together.
        self._filling: dict[tuple[tuple[str, ...], torch.dtype], dict[int, ShardedParameter]] = {}
        self._under_way: deque[_Bucket] = deque()
        # Complete ones: not in `grad` yet, where backward would add what has not crossed.
        self._summed: dict[int, tuple[ShardedParameter, Tensor]] = {}

    def add(self, p: ShardedParameter) -> None:
        """Takes up a gradient that is complete; starts its bucket if that is full now."""
        axes, grad = axes_left(p), p.parameter.grad
        if not axes or grad is None:
            return
        filling = self._filling.setdefault((axes, grad.dtype), {})
        filling[id(p.parameter)] = p
        if sum(q.parameter.nbytes for q in filling.values()) >= self._bucket_bytes:
            del self._filling[axes, grad.dtype]
            self._start(axes, list(filling.values()))

    def finish(self, parameters: Sequence[ShardedParameter]) -> None:
        """Sums all gradients of `parameters` that are not on their way, and waits for all."""
        self._filling.clear()
        groups: dict[tuple[str, ...], list[ShardedParameter]] = {}
        for p in parameters:
            if p.parameter.grad is not None:
                groups.setdefault(axes_left(p), []).append(p)
        groups.pop((), None)
        for axes, group in groups.items():
            for bucket in in_buckets(group, self._bucket_bytes):
                self._start(axes, bucket)
        while self._under_way:
            self._advance()
        for p, total in self._summed.values():
            p.parameter.grad = total
        self._summed.clear()

    def discard(self) -> None:
        """Waits for the buckets under way and drops them, and the sums."""
        self._filling.clear()
        while self._under_way:
            self._under_way.popleft().collective.wait()
        self._summed.clear()

    def _start(self, axes: tuple[str, ...], parameters: list[ShardedParameter]) -> None:
        # As many crossings end as begin, so that none is waited for that has only just started.
        for _ in axes:
            if len(self._under_way) >= _MOST_BUCKETS:
                self._advance()
        flat, dtype = _taken(parameters)
        collective = self._cross(axes[0], flat, parameters)
        self._under_way.append(_Bucket(parameters, dtype, flat, list(axes), collective))

    def _advance(self) -> None:
        """Takes the first bucket over its next axis, or its sums to the others."""
        bucket = self._under_way.popleft()
        bucket.collective.wait()
        del bucket.axes[0]
        if bucket.axes:
            bucket.collective = self._cross(bucket.axes[0], bucket.flat, bucket.parameters)
            self._under_way.append(bucket)
            return
        totals = split_like(bucket.flat.to(bucket.dtype), [p.parameter for p in bucket.parameters])
        for p, total in zip(bucket.parameters, totals, strict=True):
            key = id(p.parameter)
            if key in self._summed:
                self._summed[key][1].add_(total)
            else:
                self._summed[key] = p, total

    def _cross(self, axis: str, flat: Tensor, parameters: list[ShardedParameter]) -> Collective:
        others = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return self._lanes[axis].all_reduce(flat, f"{parameters[0].name}.grad{others}")


def _taken(parameters: list[ShardedParameter]) -> tuple[Tensor, torch.dtype]:
    """The gradients one after another, in the dtype of their sums, and their own dtype; they are
    the parameters' no longer."""
    gradients = [p.parameter.grad for p in parameters if p.parameter.grad is not None]
    dtype = gradients[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flat = gradients[0].new_empty(sum(g.numel() for g in gradients), dtype=wide)
    torch._foreach_copy_(split_like(flat, gradients), gradients)
    for p in parameters:
        p.parameter.grad = None
    return flat, dtype
