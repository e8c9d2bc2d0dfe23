"""How close to a reference is close enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest magnitude; infinite if the shapes differ or NaN came."""
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    scale = want.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    error = ((got.double() - want.double()).abs().max() / scale).item()
    return math.inf if math.isnan(error) else error


def bound(dtype: torch.dtype, terms: int) -> float:
    """Round-off of a sum of `terms` products, relative to its largest result.

    Rounding errors add up like a random walk, sqrt(terms) * eps, for terms of the result's own
    size; the factor 4 covers the largest of some thousand elements.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms)


def check(got: Tensor, want: Tensor, torchs: Tensor, *, parts: int = 1) -> None:
    """No more than twice torch's own error, and the rounding of each rank's part.

    Raises AssertionError.
    """
    eps = torch.finfo(got.dtype).eps
    limit = 2 * relative_error(torchs, want) + eps * (1 + math.sqrt(parts))
    error = relative_error(got, want)
    if not error <= limit:
        raise AssertionError(f"an error of {error:.1e}, at most {limit:.1e} is rounding")


def check_same_bits(got: Tensor, want: Tensor) -> None:
    """Raises AssertionError for any difference."""
    if not torch.equal(got, want):
        raise AssertionError("not the same bits")
