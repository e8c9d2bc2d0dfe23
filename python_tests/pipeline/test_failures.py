"""A stage that fails, dies or stalls: named on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import GridShape, models
from axonn_ext.models import ParallelConfig
from axonn_ext.pipeline import MicroBatch, Pipeline, PipelineError, PipelineOptions
from axonn_ext.spec.pipeline_options import TRANSPORTS
from axonn_ext.spec.stages import Stages
from grids import grid_of
from pipeline_cases import config_of, make, own_batches
from worker_pool import WorkerError, WorkerPool

pytestmark = pytest.mark.long


class Layer(nn.Module):
    """A Linear that calls `instead` in its `at`-th call, if its number is 2."""

    def __init__(self, number: int, instead: Callable[[Tensor], Tensor], at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number, self.instead, self.at, self.calls = number, instead, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        return self.instead(y) if (self.number, self.calls) == (2, self.at) else y


def failure(instead: Callable[[Tensor], Tensor], options: PipelineOptions) -> str:
    """This rank's error if the third of four stages calls `instead`."""
    grid = grid_of(GridShape(pipe=4))
    layers = [lambda n=n: Layer(n, instead, at=3) for n in range(4)]
    pipeline = Pipeline(layers, grid, options, loss=F.mse_loss)
    inputs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises((PipelineError, ValueError)) as error:
        pipeline.step([(x, x) for x in inputs])
    notes = getattr(error.value, "__notes__", [])
    return f"{type(error.value).__name__}: {error.value} {notes}"


def peers_fail(shape: GridShape) -> str:
    """This rank's error if a block of the last rank's stage raises."""
    model = make(config_of("gpt2", 4), shape, PipelineOptions(), ParallelConfig())
    pipeline = Pipeline(model, model.grid)
    pipeline.step(own_batches(model.grid))
    if model.grid.rank == model.grid.world_size - 1:
        model.blocks.register_module("3", Layer(2, boom, at=1))
    with pytest.raises((PipelineError, ValueError, TypeError)) as error:
        pipeline.step(own_batches(model.grid))
    with pytest.raises(PipelineError, match="cannot be used any more"):
        pipeline.step(own_batches(model.grid))
    pipeline.close()  # must not wait for messages that never come
    with Pipeline(model, model.grid):  # the model can be used again
        pass
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["x", "data"])
def test_a_failure_is_named_on_the_peers_of_the_stage(four, axis) -> None:
    for rank, text in enumerate(four.run(peers_fail, GridShape(pipe=2, **{axis: 2}))):
        if rank < 3:
            assert text.startswith("PipelineError: rank 3, stage 1, forward of micro-batch 0")


def boom(y: Tensor) -> Tensor:
    raise ValueError("boom")


def wider(y: Tensor) -> Tensor:
    return torch.cat([y, y])


def die(y: Tensor) -> Tensor:
    os._exit(9)


@pytest.fixture
def four() -> WorkerPool:
    """New ranks for each test, since they cannot continue after a failure."""
    started = WorkerPool(4)
    yield started
    started.close()


@pytest.mark.parametrize(
    "options",
    [
        PipelineOptions(),
        pytest.param(PipelineOptions(transport="c10d"), marks=pytest.mark.slow),
        pytest.param(PipelineOptions("1f1b"), marks=pytest.mark.slow),
    ],
    ids=lambda options: f"{options.schedule}, {options.transport}",
)
def test_an_error_of_a_stage_is_named_on_all_ranks(four, options) -> None:
    for rank, text in enumerate(four.run(failure, boom, options)):
        where = "rank 2, stage 2, forward of micro-batch 2"
        assert where in text and "boom" in text, (rank, text)
        assert text.startswith("ValueError" if rank == 2 else "PipelineError")


def test_a_shape_that_changes(four) -> None:
    for text in four.run(failure, wider, PipelineOptions()):
        assert "rank 2, stage 2, forward of micro-batch 2" in text
        assert "stage 3, micro-batch 2, forward: the input is [4, 4] of float32" in text
        assert "those before it were [2, 4] of float32" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_that_is_killed(four, transport) -> None:
    with pytest.raises(WorkerError) as error:
        four.run(failure, die, PipelineOptions(transport=transport))
    text = str(error.value)
    assert "rank 2: the process ended" in text
    # The pool keeps the answers of the others.
    assert four.answers.keys() == {0, 1, 3}
    for answer in four.answers.values():
        assert answer.startswith("PipelineError") and "rank 2" in answer, answer


def late(seconds: float) -> str:
    """This rank's error if a message is late by `seconds`; ranks wait for 10 s."""
    os.environ["AXONN_TIMEOUT_SECONDS"] = "10"
    grid, steps = grid_of(GridShape(pipe=4)), [0]

    def delay(direction: str, stage: int, micro_batch: int) -> float:
        is_late = (steps[0], direction, stage, micro_batch) == (1, "backward", 1, 1)
        return seconds if is_late else 0.0

    layers = [lambda: nn.Linear(4, 4)] * 4
    pipeline = Pipeline(layers, grid, loss=F.mse_loss, delay=delay)
    inputs = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))
    pipeline.step([(x, x) for x in inputs])  # all ranks have started
    steps[0] = 1
    with pytest.raises(PipelineError) as error:
        pipeline.step([(x, x) for x in inputs])
    return str(error.value)


@pytest.mark.slow
def test_a_message_that_is_late(four) -> None:
    for text in four.run(late, 20.0):
        assert "stage 1, micro-batch 1, backward: the gradient of the output did not come" in text
        assert "did not come from rank 2" in text, "the other ranks say whom their peer waits for"
        assert "within 10 s (AXONN_TIMEOUT_SECONDS)" in text


def other_rows() -> str:
    """The error for a list of modules whose losses differ between the ranks of x."""
    grid = grid_of(GridShape(pipe=2, x=2))
    layers = [lambda: nn.Linear(4, 4)] * 2
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
        pipeline.step([(x, x)])
        with pytest.raises(PipelineError) as error:
            pipeline.step([(x, x + grid.coords["x"])])
    return str(error.value)


def test_ranks_of_x_must_have_the_same_loss(pool) -> None:
    for text in pool(4).run(other_rows):
        assert "ranks of x and y must have the same losses" in text


def refused() -> list[str]:
    """The error messages for invalid pipelines."""
    grid = grid_of(GridShape(pipe=2))
    model = make(config_of("gpt2", 2), GridShape(pipe=2), PipelineOptions(), ParallelConfig())
    linear = nn.Linear(4, 4)
    elsewhere, other = nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")
    batches = own_batches(grid)
    pipeline = Pipeline(model, grid)
    cases: list[Callable[[], object]] = [
        lambda: Pipeline(model, grid, PipelineOptions("interleaved", chunks=2)),
        lambda: Pipeline(model, grid, loss=F.mse_loss),
        lambda: Pipeline([linear, nn.Linear(4, 4)], grid),
        lambda: Pipeline([linear, linear], grid, loss=F.mse_loss),
        lambda: Pipeline([linear], grid, loss=F.mse_loss),
        lambda: Pipeline(linear, grid, loss=F.mse_loss),
        lambda: Pipeline([linear, lambda: 3], grid, loss=F.mse_loss),
        lambda: models.build(config_of("gpt2", 4), grid, stages=Stages.of_sizes([2, 1], 2)),
        lambda: pipeline.step([]),
        lambda: model(batches[0].token_ids),
        lambda: MicroBatch(batches[0].token_ids, batches[0].labels) and Stages((range(0),)),
        lambda: Pipeline([elsewhere, other], grid, loss=F.mse_loss),
    ]
    found = []
    for case in cases:
        try:
            case()
            found.append("nothing")
        except (ValueError, TypeError, PipelineError) as error:
            found.append(str(error))
    pipeline.close()
    return found


def test_what_cannot_be(pool) -> None:
    first, second = pool(2).run(refused)
    expected = [
        "options.chunks=2 on pipe=2 needs 4", "has its own loss", "loss must be given",
        "layers 0 and 1 share a parameter", "1 layers cannot be split into 2 parts",
        "model must be one of axonn_ext.models or a list of modules, got Linear",
        "layer 1 must be a Module, or a function that returns one, got int",
        "stages must have the model's 4 blocks on pipe=2, got 3", "must not be empty",
        "use axonn_ext.pipeline.Pipeline", "virtual stage 0 must have blocks from 0 on",
        "parameters must be on a CPU or a CUDA GPU, got meta",
    ]  # fmt: skip
    for number, text in enumerate(expected):
        assert text in first[number], first[number]
        assert text in second[number], second[number]
    assert first[6].startswith("rank 1: TypeError: "), "it is called only on its own stage"
