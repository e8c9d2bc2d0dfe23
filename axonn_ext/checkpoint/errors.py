"""The errors of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file and the tensor."""


class RanksMissing(CheckpointError):
    """Some ranks did not arrive in time. The message names them."""
