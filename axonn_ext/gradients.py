"""Sums and clips gradients between backward and the optimizer.

Gradients are summed, never averaged, because the loss is already a mean over the global batch. Each
gradient is summed over exactly the axes that split the rows from which it is computed (see
docs/architecture.md). In the norm, a gradient of which several ranks have copies counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from axonn_ext import collectives
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.spec.grid import SUM_ORDER
from axonn_ext.spec.parallel import BUCKET_BYTES
from axonn_ext.zero import all_shards, shards_of


@torch.no_grad()
def sync_gradients(module: nn.Module) -> None:
    """Sums every gradient over the axes over which backward has not summed it; call it once a step.

    With gradient accumulation, call it after the last micro-batch. Parameters without a gradient
    are skipped; they must be the same on every rank. Collectives: all-reduces over x, z and data,
    for norms of heads also over y, in buckets, which are sent in the gradients' dtype and
    accumulated in fp32; and one of a table that both ends of a pipeline hold. Where ZeRO keeps the
    sums in parts, they are no longer in `grad`, and the all-reduces over data are reduce-scatters.
    """
    every = list(sharded_parameters(module))
    whole = [p for p in every if shards_of(p.parameter) is None]
    sum_over_ends(p for p in every if shards_of(p.parameter) is not None)
    for shards in all_shards(every):
        shards.finish()
    parameters = [p for p in whole if p.parameter.grad is not None]
    for name in SUM_ORDER:
        summed = [p for p in parameters if name in axes_left(p)]
        for bucket in in_buckets(summed, BUCKET_BYTES):
            grads = [_grad(p) for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            total = collectives.all_reduce(flat, bucket[0].grid.axis(name))
            torch._foreach_copy_(grads, split_like(total, grads))
    sum_over_ends(whole)


def sum_over_ends(parameters: Iterable[ShardedParameter]) -> None:
    """Adds the gradients of what the first and the last stage of a pipeline both hold.

    A stage that computed none adds zeros. Collectives: an all-reduce of each over the two stages.
    """
    for p in parameters:
        if p.spec.on_ends and p.grid.ends.size > 1 and p.parameter.requires_grad:
            if p.parameter.grad is None:
                p.parameter.grad = torch.zeros_like(p.parameter)
            grad = p.parameter.grad
            grad.copy_(collectives.all_reduce(grad, p.grid.ends))


def axes_left(p: ShardedParameter) -> tuple[str, ...]:
    """Returns the axes over which a gradient must still be summed after backward, in order."""
    return tuple(a for a in SUM_ORDER if a in p.spec.summed_over and p.grid.size(a) > 1)


def in_buckets(
    parameters: Iterable[ShardedParameter], num_bytes: int
) -> Iterator[list[ShardedParameter]]:
    """Yields buckets of consecutive parameters whose gradients have the same grid and dtype.

    A bucket's gradients have at most `num_bytes`, unless it has only one gradient.
    """
    bucket: list[ShardedParameter] = []
    size = 0
    for p in parameters:
        grad = _grad(p)
        alike = bucket and bucket[0].grid is p.grid and _grad(bucket[0]).dtype == grad.dtype
        if bucket and (not alike or size + grad.nbytes > num_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += grad.nbytes
    if bucket:
        yield bucket


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `flat` with the shapes of `tensors`, whose elements it holds in order."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm.

    The returned norm is that of the whole model before clipping, an fp64 scalar that is equal on
    every rank. Call this after `sync_gradients`. With an infinite `max_norm`, or if the norm is not
    finite, gradients are not scaled. Collectives: an all-reduce of one number over each of x, y,
    z and pipe, and over data where ZeRO keeps the sums in parts.

    Raises ValueError if max_norm is not positive, or the parameters lie on several grids.
    """
    return clip_sharded_(sharded_parameters(module), max_norm)


@torch.no_grad()
def clip_sharded_(parameters: Iterable[ShardedParameter], max_norm: float) -> Tensor:
    """Does what `clip_grad_norm_` does, with some parameters of one or several modules."""
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be positive, got {max_norm}")
    every = list(parameters)
    if not every:
        return torch.zeros((), dtype=torch.float64)
    grid, device = every[0].grid, every[0].parameter.device
    if any(p.grid is not grid for p in every):
        raise ValueError("clip_grad_norm_: all parameters must lie on one Grid, got several")
    all_parts = all_shards(every)
    kept = {id(p.parameter) for p in every}
    whole = [(p, _grad(p)) for p in every if p.parameter.grad is not None]
    parts = [(p, g) for s in all_parts for p, g in s.gradients() if id(p.parameter) in kept]
    square = _square(whole, device)
    if all_parts:
        square = square + collectives.all_reduce(
            _square(parts, device).view(1), grid.axis("data")
        ).view(())
    for name in ("x", "y", "z", "pipe"):
        square = collectives.all_reduce(square.view(1), grid.axis(name)).view(())
    norm = square.sqrt()
    # If a gradient is not finite, the others stay, so that it can still be found.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 1.0)
    if math.isfinite(max_norm):
        for _, gradient in (*whole, *parts):
            gradient.mul_(scale.to(gradient.dtype))
    return norm


def _square(gradients: Sequence[tuple[ShardedParameter, Tensor]], device: torch.device) -> Tensor:
    """Returns the sum of the squares in fp64, in which what several ranks hold counts once."""
    norms = torch._foreach_norm([_wide(g) for _, g in gradients]) if gradients else ()
    squares = [n.double().square() / _copies(p) for n, (p, _) in zip(norms, gradients, strict=True)]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(squares).sum()


def _grad(p: ShardedParameter) -> Tensor:
    assert p.parameter.grad is not None
    return p.parameter.grad


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _copies(p: ShardedParameter) -> int:
    """Returns the number of ranks along x, y, z and pipe that hold the same block."""
    split = {axis for axes in p.spec.dims.values() for axis in axes}
    copies = p.grid.num_parts([axis for axis in ("x", "y", "z") if axis not in split])
    return copies * p.grid.ends.size if p.spec.on_ends else copies
