"""AdamW with fp32 master weights, and the learning-rate schedule."""

from __future__ import annotations

from axonn_ext.optim.adamw import AdamW
from axonn_ext.optim.pieces import Piece
from axonn_ext.optim.schedule import WarmupCosine

__all__ = ["AdamW", "Piece", "WarmupCosine"]
