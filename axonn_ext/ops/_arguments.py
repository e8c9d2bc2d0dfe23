"""The argument check that Python must make before an op is called: that they are tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    what: str, argument: str, value: object, device: torch.device | None = None
) -> None:
    """Raises TypeError if the value is not a tensor, ValueError if it is not on the device.

    The message names `what`, the op or module, and the argument.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: {argument} must be a Tensor, got {type(value).__name__}")
    if device is not None and value.device != device:
        raise ValueError(f"{what}: {argument} is on {value.device}, expected it on {device}")
