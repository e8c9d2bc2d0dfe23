"""Gradients of a step cross the data axis once, and are divided by the loss scale."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from axonn_ext import GridShape, trace_communication
from axonn_ext.data import Batch
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.job import prepare
from axonn_ext.train.model import TrainedModel, build_model
from commands import SMALL
from grids import grid_of


def model_and_batch(shape: GridShape, **keys: object) -> tuple[TrainedModel, Batch]:
    overrides = tuple(Override(k, str(value).lower()) for k, value in (SMALL | keys).items())
    config = load_config(None, grid=f"data={shape.data}", overrides=overrides)
    job = prepare(config, world_size=shape.size)
    ids = torch.arange(2 * job.model.sequence_length).view(2, -1)
    return build_model(job, grid_of(shape)), Batch(ids, ids)


def bytes_of_a_step(mode: str, count: int) -> int:
    """Bytes that a rank sends along data. Buckets are small, so sums begin during backward."""
    keys = {"overlap.mode": mode, "overlap.bucket_bytes": 1024}
    model, batch = model_and_batch(GridShape(data=2), **keys)
    with trace_communication() as trace:
        model.forward_backward([batch] * count, 64.0, lambda name: nullcontext())
        model.finish_gradients(1.0)
    if model.orchestrator is not None:
        model.orchestrator.close()
    return trace.bytes_by_axis()["data"]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_gradients_are_summed_once_a_step(pool, mode: str) -> None:
    """In addition, each micro-batch adds a loss."""
    one, three = (pool(2).run(bytes_of_a_step, mode, count) for count in (1, 3))
    assert three == [sent + 2 * torch.float32.itemsize for sent in one]


def norm_and_factor(implementation: str, scale: float) -> tuple[float, float]:
    model, batch = model_and_batch(GridShape(), **{"model.implementation": implementation})
    model.forward_backward([batch], 64.0, lambda name: nullcontext(), loss_scale=scale)
    found = model.finish_gradients(0.01, loss_scale=scale)
    return float(found.norm), float(found.factor)


@pytest.mark.parametrize("implementation", ["axonn", "plain"])
def test_gradients_lose_the_loss_scale(pool, implementation: str) -> None:
    ((norm, factor),) = pool(1).run(norm_and_factor, implementation, 1.0)
    assert factor * norm == pytest.approx(0.01, rel=1e-3)
    assert pool(1).run(norm_and_factor, implementation, 1024.0) == [
        pytest.approx((norm, factor / 1024), rel=1e-5)
    ]
