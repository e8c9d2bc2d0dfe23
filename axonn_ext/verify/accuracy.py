"""Bounds on the errors that rounding explains."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Returns the largest error over the largest magnitude; infinite for NaN or another shape."""
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    scale = want.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    error = ((got.double() - want.double()).abs().max() / scale).item()
    return math.inf if math.isnan(error) else error


def bound(dtype: torch.dtype, terms: int) -> float:
    """Returns a bound on the round-off of a sum of `terms` products, relative to the largest sum.

    Rounding errors add up like a random walk, to sqrt(terms) * eps for terms of the size of the
    result. The factor 4 covers the largest of some thousand elements.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms)


def check(got: Tensor, want: Tensor, torchs: Tensor, *, parts: int = 1) -> None:
    """Raises AssertionError if the error exceeds the bound.

    The bound is twice torch's own error, plus the rounding of each rank's part.
    """
    eps = torch.finfo(got.dtype).eps
    limit = 2 * relative_error(torchs, want) + eps * (1 + math.sqrt(parts))
    error = relative_error(got, want)
    if not error <= limit:
        raise AssertionError(f"an error of {error:.1e}, at most {limit:.1e} is rounding")


def check_same_bits(got: Tensor, want: Tensor) -> None:
    """Raises AssertionError if any bit differs."""
    if not torch.equal(got, want):
        raise AssertionError("not the same bits")
