"""What Python sees of an argument that is not what it should be: that it is no tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    what: str, argument: str, value: object, device: torch.device | None = None
) -> None:
    """Raises TypeError or ValueError, naming op or module and argument, for what is no tensor, or
    not on the device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: {argument} must be a Tensor, got {type(value).__name__}")
    if device is not None and value.device != device:
        raise ValueError(f"{what}: {argument} is on {value.device}, expected it on {device}")
