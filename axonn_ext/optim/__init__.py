"""AdamW and Muon with fp32 masters, the learning-rate schedule, and the loss scale of fp16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_ext.optim.adamw import AdamW
from axonn_ext.optim.loss_scaler import LossScaler
from axonn_ext.optim.pieces import Piece, freeze
from axonn_ext.optim.schedule import Schedule
from axonn_ext.spec import lazy_names
from axonn_ext.spec.optimizer import ParameterGroup

if TYPE_CHECKING:
    from axonn_ext.optim.muon import Muon as Muon
else:  # loaded by the few runs that use it
    __getattr__, __dir__, _LATER = lazy_names(__name__, {".muon": "Muon"})

__all__ = ["AdamW", "LossScaler", "Muon", "ParameterGroup", "Piece", "Schedule", "freeze"]
