"""The whole gradients of a step, as a training loop computes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from axonn_ext import sync_gradients
from axonn_ext.models import Transformer
from axonn_ext.overlap import Orchestrator


def compute_gradients(
    model: Transformer,
    orchestrator: Orchestrator | None,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    num_labels: float,
) -> float:
    """Forward and backward of all micro-batches (ids, labels), and the sums; returns the loss."""
    total = 0.0
    for index, (ids, labels) in enumerate(micro_batches):
        loss = model.loss(ids, labels, num_labels)
        waits = orchestrator is not None and index < len(micro_batches) - 1
        with orchestrator.no_sync() if orchestrator and waits else nullcontext():
            loss.backward()
        total += loss.item()
    if orchestrator is None:
        sync_gradients(model)
    else:
        orchestrator.sync_gradients()
    return total
