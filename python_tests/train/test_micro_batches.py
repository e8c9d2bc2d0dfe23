"""Gradients cross the data axis once a step, however many micro-batches it has."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from axonn_ext import GridShape, trace_communication
from axonn_ext.data import Batch
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.job import prepare
from axonn_ext.train.model import build_model
from commands import SMALL
from grids import grid_of


def bytes_of_a_step(mode: str, count: int) -> int:
    """Bytes that a rank sends along data. Buckets are small, so sums begin during backward."""
    keys = SMALL | {"overlap.mode": mode, "overlap.bucket_bytes": 1024}
    overrides = tuple(Override(key, str(value).lower()) for key, value in keys.items())
    job = prepare(load_config(None, grid="data=2", overrides=overrides), world_size=2)
    model = build_model(job, grid_of(GridShape(data=2)))
    ids = torch.randint(job.model.vocab_size, (2, job.model.sequence_length))
    with trace_communication() as trace:
        model.forward_backward([Batch(ids, ids)] * count, 64.0, lambda name: nullcontext())
        model.finish_gradients(1.0)
    if model.orchestrator is not None:
        model.orchestrator.close()
    return trace.bytes_by_axis()["data"]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_gradients_are_summed_once_a_step(pool, mode: str) -> None:
    """Besides, each micro-batch adds a loss."""
    one, three = (pool(2).run(bytes_of_a_step, mode, count) for count in (1, 3))
    assert three == [sent + 2 * torch.float32.itemsize for sent in one]
