"""What happens to gradients between backward and the optimizer: sums, norm, clipping.

Gradients are summed, never averaged: the loss is a mean over the global batch already. Each is
summed over exactly the axes that split the rows it is computed from (shared rule, see
docs/architecture.md); a copy that several ranks hold counts once in the norm.
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


@torch.no_grad()
def sync_gradients(module: nn.Module) -> None:
    """Sums every gradient over the axes that backward has left; call it once a step.

    With gradient accumulation, once after the last micro-batch. Parameters without a gradient are
    passed over, and must be so on every rank. Collectives: bucketed all-reduces over x, z and data;
    accumulated in fp32, in the gradients' dtype between ranks.
    """
    parameters = [p for p in sharded_parameters(module) if p.parameter.grad is not None]
    for name in SUM_ORDER:
        summed = [p for p in parameters if name in axes_left(p)]
        for bucket in in_buckets(summed, BUCKET_BYTES):
            grads = [_grad(p) for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            total = collectives.all_reduce(flat, bucket[0].grid.axis(name))
            torch._foreach_copy_(grads, split_like(total, grads))


def axes_left(p: ShardedParameter) -> tuple[str, ...]:
    """The axes over which backward has left a gradient to be summed, in the order of the sums."""
    return tuple(a for a in SUM_ORDER if a in p.spec.summed_over and p.grid.size(a) > 1)


def in_buckets(
    parameters: Iterable[ShardedParameter], num_bytes: int
) -> Iterator[list[ShardedParameter]]:
    """Runs of gradients of one grid and dtype, at most `num_bytes` each (or one gradient)."""
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
    """Views of the parts of `flat`, which are the elements of `tensors` one after another."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns it.

    The norm returned, an fp64 scalar, is the one before clipping that a single process would
    compute on the whole model, the same on every rank. Call it after `sync_gradients`.
    `max_norm` may be infinite: just the norm.
    Collectives: one number over each of x, y and z.

    Raises ValueError if max_norm is not positive, or the parameters lie on several grids.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be positive, got {max_norm}")
    parameters = [p for p in sharded_parameters(module) if p.parameter.grad is not None]
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm([_wide(_grad(p)) for p in parameters])
    square = torch.stack(
        [norm.double().square() / _copies(p) for norm, p in zip(norms, parameters, strict=True)]
    ).sum()
    grid = parameters[0].grid
    if any(p.grid is not grid for p in parameters):
        raise ValueError("clip_grad_norm_: all parameters must lie on one Grid, got several")
    for name in ("x", "y", "z"):
        square = collectives.all_reduce(square.view(1), grid.axis(name)).view(())
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if math.isfinite(max_norm):
        for p in parameters:
            _grad(p).mul_(scale.to(_grad(p).dtype))
    return norm


def _grad(p: ShardedParameter) -> Tensor:
    assert p.parameter.grad is not None
    return p.parameter.grad


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _copies(p: ShardedParameter) -> int:
    """How many ranks along x, y and z hold the same block."""
    split = {axis for axes in p.spec.dims.values() for axis in axes}
    return p.grid.num_parts([axis for axis in ("x", "y", "z") if axis not in split])
