"""Pipelines with messages between GPUs, against the same pipelines on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axonn_ext import GridShape, clip_grad_norm_, full_gradients, models
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.pipeline import MicroBatch, Pipeline, PipelineOptions
from axonn_ext.spec.stages import Stages
from grids import grid_of, relative_error

pytestmark = pytest.mark.gpu

OPTIONS = [
    PipelineOptions(),
    PipelineOptions(defer_weights=False),
    PipelineOptions("1f1b"),
    PipelineOptions("interleaved", chunks=2),
    PipelineOptions("zero_bubble"),
]


def results(
    device: str, shape: GridShape, options: PipelineOptions
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, norm and gradients of two steps of a small GPT-2 with a tied table, in fp64."""
    grid = grid_of(shape)
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=8, num_heads=4, sequence_length=16
    )
    stages = Stages.balanced(config, shape.pipe, options.chunks)
    model = models.build(
        config,
        grid,
        ParallelConfig(algorithm="sequential"),
        stages=stages,
        seed=0,
        dtype=torch.float64,
        device=device,
    )
    tokens = torch.randint(64, (8, 2, 17), generator=torch.Generator().manual_seed(1)).to(device)
    batches = [MicroBatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    with Pipeline(model, grid, options) as pipeline:
        losses = [pipeline.step(batches[:4]), pipeline.step(batches[4:])]
        pipeline.sync_gradients()
        norm = clip_grad_norm_(model, 1.0)
    gradients = {name: g.cpu() for name, g in full_gradients(model).items()}
    return sum(loss.item() for loss in losses), float(norm), gradients


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.schedule}, {o.defer_weights}")
@pytest.mark.parametrize(
    "shape", [GridShape(pipe=2), GridShape(pipe=4), GridShape(pipe=2, x=2)], ids=str
)
def test_a_pipeline_equals_that_of_the_cpu(pool, gpu_pool, shape, options):
    want_loss, want_norm, want = pool(shape.size).run(results, "cpu", shape, options)[0]
    for loss, norm, got in gpu_pool(shape.size).run(results, "cuda", shape, options):
        assert loss == pytest.approx(want_loss, rel=1e-12)
        assert norm == pytest.approx(want_norm, rel=1e-12)
        assert got.keys() == want.keys()
        for name, gradient in got.items():
            assert relative_error(gradient, want[name]) < 1e-10, name


def fails_and_begins_anew() -> tuple[str, float]:
    """The error if the last stage's loss refuses a shape, and the loss of a new pipeline."""
    grid = grid_of(GridShape(pipe=2))
    layers = [nn.Linear(4, 4, device="cuda") for _ in range(2)]
    x, bad = torch.ones(2, 4, device="cuda"), torch.ones(2, 3, device="cuda")
    with pytest.raises(RuntimeError) as error, Pipeline(layers, grid, loss=F.mse_loss) as first:
        first.step([(x, x), (x, bad), (x, x)])
    with Pipeline(layers, grid, loss=F.mse_loss) as second:
        losses = [second.step([(x, x)] * 4).item() for _ in range(2)]
    assert losses[0] == losses[1]
    return f"{type(error.value).__name__}: {error.value}", losses[0]


def test_a_failure_is_named_and_a_new_pipeline_runs(gpu_pool):
    (told, loss), (own, same) = gpu_pool(2).run(fails_and_begins_anew)
    assert told.startswith("PipelineError: rank 1, stage 1, forward of micro-batch 1"), told
    assert own.startswith("RuntimeError"), own
    assert loss == same > 0
