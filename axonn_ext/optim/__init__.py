"""AdamW with fp32 master weights, the learning-rate schedule, and the loss scale of fp16."""

from __future__ import annotations

from axonn_ext.optim.adamw import AdamW
from axonn_ext.optim.loss_scaler import LossScaler
from axonn_ext.optim.pieces import Piece
from axonn_ext.optim.schedule import WarmupCosine

__all__ = ["AdamW", "LossScaler", "Piece", "WarmupCosine"]
