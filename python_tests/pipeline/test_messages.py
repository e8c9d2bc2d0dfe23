"""Messages through shared memory, over c10d, and by both ways in one pipeline."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import GridShape, full_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.pipeline import Pipeline, PipelineOptions, wires
from grids import grid_of
from pipeline_cases import config_of, make, own_batches

PAGE = 4096


def bits(shape: GridShape, options: PipelineOptions, unreachable: bool) -> tuple[bytes, int]:
    """The results' bits, and the bytes of shared memory; rank 1 may not get at that of others."""
    model = make(config_of("gpt2", 4), shape, options, ParallelConfig())
    refused = mock.patch.object(wires, "_receivers", lambda addresses: {})
    with refused if unreachable and model.grid.rank == 1 else nullcontext():
        pipeline = Pipeline(model, model.grid, options)
    with pipeline:
        loss = pipeline.step(own_batches(model.grid))
        pipeline.sync_gradients()
        tensors = [loss, *full_gradients(model).values()]
        shared = pipeline.stats.shared_bytes
    return b"".join(t.contiguous().numpy().tobytes() for t in tensors), shared


@pytest.mark.parametrize("shape", [GridShape(pipe=4), GridShape(pipe=2, x=2)], ids=str)
def test_all_ways_give_the_same_bits(pool, shape) -> None:
    shared = pool(4).run(bits, shape, PipelineOptions(), False)
    c10d = pool(4).run(bits, shape, PipelineOptions(transport="c10d"), False)
    mixed = pool(4).run(bits, shape, PipelineOptions(), True)
    assert len({result for found in (shared, c10d, mixed) for result, _ in found}) == 1
    assert all(bytes_ > 0 for _, bytes_ in shared)
    assert all(bytes_ == 0 for _, bytes_ in c10d)
    # Whoever sends to rank 1 alone has no shared memory left to send through.
    assert {bytes_ > 0 for _, bytes_ in mixed} == {True, False}


class InPlace(nn.Module):
    """Overwrites its input, as ReLU(inplace=True) does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2) if not x.requires_grad else x * 2)


def evaluations(transport: str) -> list[float]:
    grid = grid_of(GridShape(pipe=4))
    layers = []
    for seed in range(4):
        torch.manual_seed(seed)
        layers.append(InPlace())
    inputs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    with Pipeline(layers, grid, PipelineOptions(transport=transport), loss=F.mse_loss) as pipeline:
        return [pipeline.evaluate([(x.clone(), x) for x in inputs]).item() for _ in range(3)]


def test_a_stage_may_overwrite_its_input(pool) -> None:
    found = pool(4).run(evaluations, "auto") + pool(4).run(evaluations, "c10d")
    assert len({loss for losses in found for loss in losses}) == 1


def memory(steps: int) -> list[int]:
    grid = grid_of(GridShape(pipe=2))
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    inputs = torch.randn(8, 2 * PAGE // 32, 8)  # messages of two pages
    with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
        found = []
        for _ in range(steps):
            pipeline.step([(x, x) for x in inputs])
            found.append(pipeline.stats.shared_bytes)
    return found


def test_memory_of_messages_is_used_again(pool) -> None:
    first, second = pool(2).run(memory, 12)
    # The first stage has at most 4 micro-batches in flight; a message of a micro-batch that has
    # come back may be let go of a little later. A form takes a page.
    assert first[-1] <= (4 + 2) * 2 * PAGE + PAGE
    assert second[-1] <= (4 + 2) * 2 * PAGE + PAGE


def threads_after_a_failure() -> int:
    grid = grid_of(GridShape(pipe=2))
    pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], grid, loss=F.mse_loss)
    with pytest.raises(RuntimeError), pipeline:
        pipeline.step([(torch.ones(1, 4), torch.ones(1, 3))])  # no loss has these shapes
    until = time.monotonic() + 20
    while (left := _num_threads()) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _num_threads() -> int:
    return sum(thread.name == "axonn pipeline" for thread in threading.enumerate())


def test_no_thread_is_left_after_a_failure(pool) -> None:
    assert pool(2).run(threads_after_a_failure) == [0, 0]
