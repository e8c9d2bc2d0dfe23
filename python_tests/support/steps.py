"""The gradients of a whole step, computed as in a training loop."""

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
    """Runs forward, backward and the sums for micro-batches (ids, labels); returns the loss."""
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
