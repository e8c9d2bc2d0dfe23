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


@dataclass(eq=False)
class _Bucket:
    """Gradients on their way over one axis after the other."""

    parameters: list[ShardedParameter]
    gradients: list[Tensor]  # this rank's own, for their shapes and dtype
    flat: Tensor
    axes: list[str]  # that are left, the one being crossed first
    collective: Collective


class BucketedSums:
    """Gradients over the axes that are left after backward, in buckets that start once full.

    A gradient on its way is not in its parameter's `grad`; what backward adds meanwhile goes the
    same way later, and the sums are added: the result is right whenever a bucket starts. Sums of
    low-precision gradients are made, and sent, in fp32.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, bucket_bytes: int) -> None:
        self._lanes, self._bucket_bytes = lanes, bucket_bytes
        # By axes and dtype, since only gradients that have both in common go together.
        self._filling: dict[tuple[tuple[str, ...], torch.dtype], dict[int, ShardedParameter]] = {}
        self._under_way: deque[_Bucket] = deque()

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
            self._advance(self._under_way.popleft())

    def discard(self) -> None:
        """Waits for the buckets under way and drops them."""
        self._filling.clear()
        while self._under_way:
            self._under_way.popleft().collective.wait()

    def _start(self, axes: tuple[str, ...], parameters: list[ShardedParameter]) -> None:
        gradients = []
        for p in parameters:
            assert p.parameter.grad is not None
            gradients.append(p.parameter.grad)
            p.parameter.grad = None
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = flat if flat.dtype == torch.float64 else flat.float()
        collective = self._cross(axes[0], flat, parameters)
        self._under_way.append(_Bucket(parameters, gradients, flat, list(axes), collective))

    def _advance(self, bucket: _Bucket) -> None:
        """Takes a bucket over its next axis, or its sums to where they belong."""
        bucket.collective.wait()
        del bucket.axes[0]
        if bucket.axes:
            bucket.collective = self._cross(bucket.axes[0], bucket.flat, bucket.parameters)
            self._under_way.append(bucket)
            return
        totals = split_like(bucket.flat.to(bucket.gradients[0].dtype), bucket.gradients)
        for p, total in zip(bucket.parameters, totals, strict=True):
            grad = p.parameter.grad
            p.parameter.grad = total if grad is None else grad.add_(total)

    def _cross(self, axis: str, flat: Tensor, parameters: list[ShardedParameter]) -> Collective:
        others = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return self._lanes[axis].all_reduce(flat, f"{parameters[0].name}.grad{others}")
