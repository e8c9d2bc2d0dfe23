"""Where AdamW's state lies: on the device, in host memory, or in a memory-mapped file."""

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

    offload  "none": on the device; "cpu": in host memory, pinned for a GPU; "disk": in unnamed
             files, which are mapped into memory and disappear with the process
    folder   of the files
    """

    offload: str
    device: torch.device
    folder: Path

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns `numel` zeros. Raises OSError if the disk is full."""
        if self.offload == "none":
            return torch.zeros(numel, dtype=dtype, device=self.device)
        if self.offload == "cpu":
            return torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")
        return _mapped(self.folder, numel, dtype)


def _mapped(folder: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros in a new file, which disappears when nothing uses the tensor any more.

    The file never has a name (O_TMPFILE), so that a killed process leaves nothing behind.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        # Allocate all of it now: with a full disk, a later write to the memory would kill the
        # process.
        os.posix_fallocate(file.fileno(), 0, max(1, numel) * dtype.itemsize)
        path = f"/proc/self/fd/{file.fileno()}"
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
