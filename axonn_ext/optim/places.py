"""Where AdamW's state lies: on the device, in host memory, or in a file that is mapped there."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Memory for AdamW's state.

    offload  "none": on the device; "cpu": in host memory, which is pinned for a GPU; "disk": in
             files without a name, which are mapped into memory and end with the process
    folder   of the files
    """

    offload: str
    device: torch.device
    folder: Path

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns so many zeros. Raises OSError where the disk has no room."""
        if self.offload == "none":
            return torch.zeros(numel, dtype=dtype, device=self.device)
        if self.offload == "cpu":
            return torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")
        return _mapped(self.folder, numel, dtype)


def _mapped(folder: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros in a new file, which is gone when nothing uses the tensor any more.

    The file never has a name (O_TMPFILE), so that nothing is left of a process that is killed.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it is taken now: a full disk would end the process when the memory is written.
        os.posix_fallocate(file.fileno(), 0, max(1, numel) * dtype.itemsize)
        path = f"/proc/self/fd/{file.fileno()}"
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
