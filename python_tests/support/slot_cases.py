"""Slots to add up, on CPUs and GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
# One slot, empty slots, one number each, not a multiple of a vector, more than a CPU's block.
SHAPES = ((1, 7), (3, 0), (5,), (4, 2, 33), (8, 70_001))


def make_slots(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns numbers whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(len(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (100 * numbers).to(dtype)


def sums_in_order(slots: Tensor) -> Tensor:
    """Returns the sum of the slots in order, in the dtype of accumulation."""
    wide = slots.float() if slots.dtype in (torch.bfloat16, torch.float16) else slots
    total = wide[0].clone()
    for slot in wide[1:]:
        total += slot
    return total.to(slots.dtype)
