"""Sums each gradient over z as soon as backward has computed it, and over other axes in buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.nn.sharded import ShardedParameter, axes_left
from axonn_ext.optim.gradients import in_buckets, split_like
from axonn_ext.overlap.lane import Collective, Lane


@dataclass(eq=False)
class _Scatter:
    """A reduce-scatter over z, made of an exchange of blocks and of their sum on this rank."""

    p: ShardedParameter
    blocks: Tensor
    input: Tensor  # kept alive, since the collective reads it
    collective: Collective


class ScatteredSums:
    """Reduce-scatters the gradients of gathered weights over z, at most `deferred` at a time.

    Ranks exchange blocks in the gradients' dtype, and each rank adds the blocks that it receives in
    rank order in fp32 (fp64 for fp64). So the sum is repeatable, and bitwise equal to that of the
    fused ops.
    """

    def __init__(self, lane: Lane, *, deferred: int) -> None:
        self._lane, self._deferred = lane, deferred
        self._under_way: deque[_Scatter] = deque()

    def start(self, p: ShardedParameter, gradient: Tensor) -> list[ShardedParameter]:
        """Starts the sum of one gradient [Gz * rows, ...].

        Returns the parameters whose sums are now complete and have been added to `grad`.
        """
        gradient = gradient.contiguous()
        blocks = torch.empty_like(gradient)
        collective = self._lane.all_to_all(blocks, gradient, f"{p.name}.grad")
        self._under_way.append(_Scatter(p, blocks, gradient, collective))
        return self._finish(self._deferred)

    def finish(self) -> list[ShardedParameter]:
        """Completes every sum and returns their parameters, one per sum."""
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
            total = sum_of_blocks(scatter.blocks, self._lane.axis.size)
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
            done.append(scatter.p)
        return done


def sum_of_blocks(blocks: Tensor, num_blocks: int) -> Tensor:
    """Returns the sum of blocks of rows, added in order in fp32 (fp64 for fp64)."""
    first, *rest = blocks.chunk(num_blocks)
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = first.to(wide, copy=True)
    for block in rest:
        total += block
    return total.to(first.dtype)


# One bucket is being summed and the next is queued. More would not keep an axis busier.
_MOST_BUCKETS = 2


@dataclass(eq=False)
class _Bucket:
    """Gradients that are summed together, over one axis after another."""

    parameters: list[ShardedParameter]
    dtype: torch.dtype  # the dtype of the gradients
    flat: Tensor  # all gradients, in the dtype in which they are summed
    axes: list[str]  # the remaining axes; the first is being summed over
    collective: Collective


class BucketedSums:
    """Sums gradients over the axes left after backward, in buckets that start once full.

    While a gradient is being summed, it is not in its parameter's `grad`. What backward adds to
    `grad` in the meantime is summed separately later, and the two sums are added. So the result is
    correct whenever a bucket starts. Low-precision gradients are sent and summed in fp32. At most
    two buckets need memory for this at a time, because a bucket starts only once the second to last
    is summed and cast back to the gradients' dtype.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, bucket_bytes: int) -> None:
        self._lanes, self._bucket_bytes = lanes, bucket_bytes
        # By axes and dtype, since only gradients that share both can share a bucket.
        self._filling: dict[tuple[tuple[str, ...], torch.dtype], dict[int, ShardedParameter]] = {}
        self._under_way: deque[_Bucket] = deque()
        # Complete sums. They are not put into `grad` yet, where backward would add gradients that
        # are not summed over ranks.
        self._summed: dict[int, tuple[ShardedParameter, Tensor]] = {}

    def add(self, p: ShardedParameter) -> None:
        """Adds a parameter's complete gradient to a bucket, and starts the bucket if full."""
        axes, grad = axes_left(p), p.parameter.grad
        if not axes or grad is None:
            return
        filling = self._filling.setdefault((axes, grad.dtype), {})
        filling[id(p.parameter)] = p
        if sum(q.parameter.nbytes for q in filling.values()) >= self._bucket_bytes:
            del self._filling[axes, grad.dtype]
            self._start(axes, list(filling.values()))

    def finish(self, parameters: Sequence[ShardedParameter]) -> None:
        """Starts the sums of all other gradients of `parameters`, and waits for all sums."""
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
        """Waits for the buckets under way, and drops them and all sums."""
        self._filling.clear()
        while self._under_way:
            self._under_way.popleft().collective.wait()
        self._summed.clear()

    def _start(self, axes: tuple[str, ...], parameters: list[ShardedParameter]) -> None:
        # A bucket has one collective per axis. The same number is awaited here, so that none is
        # awaited right after its start.
        for _ in axes:
            if len(self._under_way) >= _MOST_BUCKETS:
                self._advance()
        flat, dtype = _taken(parameters)
        collective = self._cross(axes[0], flat, parameters)
        self._under_way.append(_Bucket(parameters, dtype, flat, list(axes), collective))

    def _advance(self) -> None:
        """Waits for the first bucket, then starts its next axis or adds it to the complete sums."""
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
    """Removes the gradients from the parameters.

    Returns them concatenated, in the dtype of their sums, and their own dtype.
    """
    gradients = [p.parameter.grad for p in parameters if p.parameter.grad is not None]
    dtype = gradients[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flat = gradients[0].new_empty(sum(g.numel() for g in gradients), dtype=wide)
    torch._foreach_copy_(split_like(flat, gradients), gradients)
    for p in parameters:
        p.parameter.grad = None
    return flat, dtype
