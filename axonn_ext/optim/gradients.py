"""Sums and clips gradients between backward and the optimizer.

Gradients are summed, never averaged, because the loss is already a mean over the global batch. Each
gradient is summed over exactly the axes that split the rows from which it is computed (see
docs/architecture.md). In the norm, a gradient with copies on several ranks counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import ShardedParameter, axes_left, sharded_parameters
from axonn_ext.optim.zero import all_shards, shards_of
from axonn_ext.ranks import collectives
from axonn_ext.spec.grid import SUM_ORDER
from axonn_ext.spec.parallel import BUCKET_BYTES


@torch.no_grad()
def sync_gradients(module: nn.Module) -> None:
    """Sums every gradient over the axes that backward does not sum over; call it once per step.

    With gradient accumulation, call it after the last micro-batch. Parameters without a gradient
    are skipped; they must be the same on every rank. Collectives: all-reduces over x, z and data,
    for norms of heads also over y, in buckets, which are sent in the gradients' dtype and
    accumulated in fp32; and one of a table that both ends of a pipeline hold. If ZeRO keeps the
    sums in parts, they are no longer in `grad`, and the all-reduces over data are reduce-scatters;
    an all-gather of a number for each parameter compares which gradients exist. All parameters of
    such an optimizer are summed together, even those that are not in `module`.

    Raises RuntimeError, on every rank of data, if ZeRO finds that these ranks have gradients of
    different parameters.
    """
    every = list(sharded_parameters(module))
    whole = [p for p in every if shards_of(p.parameter) is None]
    for shards in all_shards(every):
        sum_over_ends(shards.parameters)
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
    """Adds the gradients of parameters that the first and the last pipeline stage both hold.

    A stage without a gradient adds zeros. Collectives: an all-reduce of each over the two stages.
    """
    for p in parameters:
        if p.spec.on_ends and p.grid.ends.size > 1 and p.parameter.requires_grad:
            if p.parameter.grad is None:
                p.parameter.grad = torch.zeros_like(p.parameter)
            grad = p.parameter.grad
            grad.copy_(collectives.all_reduce(grad, p.grid.ends))


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


class GradientNorm(NamedTuple):
    """The result of `gradient_norm`: fp64 scalars, equal on every rank.

    norm: of the gradients of the whole model, without the loss scale. factor: multiplies the
    gradients to remove the loss scale and to clip them to the maximum norm.
    """

    norm: Tensor
    factor: Tensor


@torch.no_grad()
def gradient_norm(
    module: nn.Module, max_norm: float = math.inf, *, loss_scale: float = 1.0
) -> GradientNorm:
    """Returns the global norm of all gradients, and the factor to multiply them by; changes none.

    `optim.AdamW.step` takes the factor. Call this after `sync_gradients`. loss_scale: the factor by
    which the loss was multiplied before backward. If gradients have overflowed, the norm is not
    finite, and the factor is meaningless. Squares are added in fp32 within a gradient (fp64 for
    fp64), and in fp64 over gradients and ranks. Collectives: an all-reduce of one number over each
    of x, y, z and pipe, and over data if ZeRO keeps the sums in parts.

    Raises ValueError if max_norm is not positive, loss_scale is not positive and finite, or the
    parameters lie on several grids.
    Source: Micikevicius et al., arXiv:1710.03740, section 3.2.
    """
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"gradient_norm: loss_scale must be positive and finite, got {loss_scale}")
    norm = _norm("gradient_norm", list(sharded_parameters(module)), max_norm) / loss_scale
    return GradientNorm(norm, clipping_factor(norm, max_norm) / loss_scale)


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that scales gradients with norm `norm` to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm.

    The returned norm is that of the whole model before clipping, an fp64 scalar that is equal on
    every rank. Call this after `sync_gradients`. With an infinite `max_norm`, or if the norm is not
    finite, gradients are not scaled. Collectives: an all-reduce of one number over each of x, y,
    z and pipe, and over data if ZeRO keeps the sums in parts.

    Raises ValueError if max_norm is not positive, or the parameters lie on several grids.
    """
    return clip_sharded_(sharded_parameters(module), max_norm)


@torch.no_grad()
def clip_sharded_(parameters: Iterable[ShardedParameter], max_norm: float) -> Tensor:
    """Same as `clip_grad_norm_` for some parameters of one or several modules."""
    every = list(parameters)
    norm = _norm("clip_grad_norm_", every, max_norm)
    # If a gradient is not finite, do not scale the others, so that it can still be found.
    factor = clipping_factor(norm, max_norm).where(norm.isfinite(), 1.0)
    if math.isfinite(max_norm):
        for _, gradient in (*_whole(every), *_parts(every)):
            gradient.mul_(factor.to(gradient.dtype))
    return norm


def _norm(caller: str, every: list[ShardedParameter], max_norm: float) -> Tensor:
    """Returns the norm of all gradients; names the caller in errors."""
    if not max_norm > 0:
        raise ValueError(f"{caller}: max_norm must be positive, got {max_norm}")
    if not every:
        return torch.zeros((), dtype=torch.float64)
    grid, device = every[0].grid, every[0].parameter.device
    if any(p.grid is not grid for p in every):
        raise ValueError(f"{caller}: all parameters must lie on one Grid, got several")
    square = _square(_whole(every), device)
    if all_shards(every):
        of_parts = _square(_parts(every), device).view(1)
        square = square + collectives.all_reduce(of_parts, grid.axis("data")).view(())
    for name in ("x", "y", "z", "pipe"):
        square = collectives.all_reduce(square.view(1), grid.axis(name)).view(())
    return square.sqrt()


def _whole(every: Iterable[ShardedParameter]) -> list[tuple[ShardedParameter, Tensor]]:
    """Returns the gradients that are whole on this rank."""
    return [(p, p.parameter.grad) for p in every if p.parameter.grad is not None]


def _parts(every: Iterable[ShardedParameter]) -> list[tuple[ShardedParameter, Tensor]]:
    """Returns this rank's parts of gradients that are summed over data (ZeRO)."""
    every = list(every)
    kept = {id(p.parameter) for p in every}
    found = [pair for shards in all_shards(every) for pair in shards.gradients()]
    return [(p, gradient) for p, gradient in found if id(p.parameter) in kept]


def _square(gradients: Sequence[tuple[ShardedParameter, Tensor]], device: torch.device) -> Tensor:
    """Returns the sum of the squares in fp64; blocks that several ranks hold count once."""
    norms = torch._foreach_norm([widened(g) for _, g in gradients]) if gradients else ()
    squares = [n.double().square() / _copies(p) for n, (p, _) in zip(norms, gradients, strict=True)]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(squares).sum()


def _grad(p: ShardedParameter) -> Tensor:
    assert p.parameter.grad is not None
    return p.parameter.grad


def widened(t: Tensor) -> Tensor:
    """Returns a tensor of lower precision in fp32, and others unchanged."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _copies(p: ShardedParameter) -> int:
    """Returns the number of ranks along x, y, z and pipe that hold the same block."""
    split = {axis for axes in p.spec.dims.values() for axis in axes}
    copies = p.grid.num_parts([axis for axis in ("x", "y", "z") if axis not in split])
    return copies * p.grid.ends.size if p.spec.on_ends else copies
