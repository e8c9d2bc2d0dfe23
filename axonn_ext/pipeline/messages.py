"""Messages between neighbouring stages: their names and their forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from axonn_ext.pipeline.failures import PipelineError

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = MappingProxyType({FORWARD: 1, BACKWARD: -1})  # to which neighbour messages go
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
_HEADER_SIZE = _MOST_DIMS + 2

# (direction, receiving virtual stage, micro-batch) -> seconds by which the message is delayed.
Delay = Callable[[str, int, int], float]


@dataclass(frozen=True)
class Message:
    """The input of a virtual stage (forward), or the gradient of its output (backward)."""

    direction: str
    stage: int  # the virtual stage that gets it
    micro_batch: int

    def __str__(self) -> str:
        what = "input" if self.direction == FORWARD else "gradient of the output"
        return f"stage {self.stage}, micro-batch {self.micro_batch}, {self.direction}: the {what}"


@dataclass(frozen=True)
class Form:
    """The shape and dtype of the messages of one kind."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Returns a tensor's form. Raises PipelineError if it cannot be a message."""
        if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMS:
            raise PipelineError(
                f"a stage must return a tensor of {', '.join(map(str, _DTYPES))} with at most "
                f"{_MOST_DIMS} dims, got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def header(self) -> Tensor:
        """Returns the form as numbers, which precede the first message."""
        numbers = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))

    @classmethod
    def read(cls, header: Tensor) -> Form:
        dtype, dims, *sizes = header.tolist()
        return cls(tuple(sizes[:dims]), _DTYPES[dtype])

    def __str__(self) -> str:
        return f"{list(self.shape)} of {str(self.dtype).removeprefix('torch.')}"


HEADER = Form((_HEADER_SIZE,), torch.int64)  # the form of a header itself
