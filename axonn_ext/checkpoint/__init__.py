"""Checkpoints that any grid can read: safetensors and JSON, written atomically.

    checkpoint.save(folder, model=model, optimizer=optimizer, extra={"step": step})
    extra = checkpoint.load(folder, model=model, optimizer=optimizer)

A tensor is described by its name, its whole shape and the offsets of each block, so a checkpoint
knows nothing of the grid that wrote it. Loading runs no code of the files. See docs/checkpoints.md.
"""

from __future__ import annotations

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.load import load
from axonn_ext.checkpoint.save import save
from axonn_ext.checkpoint.saver import Saver

__all__ = ["CheckpointError", "Saver", "load", "save"]
