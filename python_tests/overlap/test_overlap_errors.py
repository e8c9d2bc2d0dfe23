"""Runs whose ranks are slow, die, or differ."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import Grid, GridShape, models, sync_gradients
from axonn_ext.kernels import extension
from axonn_ext.overlap import Orchestrator, Overlap
from axonn_ext.spec import settings
from grids import grid_of, relative_error
from model_cases import LLAMA, random_batch
from test_overlap import Shuffled
from worker_pool import WorkerError, WorkerPool

pytestmark = pytest.mark.long

SHAPE = GridShape(z=2, data=2)


def make_model() -> Any:
    return models.build(LLAMA, grid_of(SHAPE), seed=2)


def own(t: Tensor) -> Tensor:
    return grid_of(SHAPE).shard(t, {0: ("data", "z")})


def loss_of(model: Any) -> Tensor:
    ids, labels = random_batch()
    return model.loss(own(ids), own(labels), 48.0)


def slow_rank() -> float:
    """One rank sleeps in forward and backward of each step; returns the error of the result."""
    expected = make_model()
    loss_of(expected).backward()
    sync_gradients(expected)
    model = make_model()
    if grid_of(SHAPE).rank == 1:
        model.blocks[0].mlp.down.register_forward_hook(lambda *_: time.sleep(0.4))
        model.blocks[1].mlp.down.weight.register_hook(lambda *_: time.sleep(0.4))
    with Orchestrator(model, Overlap(prefetch=2)) as orchestrator:
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()
            orchestrator.sync_gradients()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(relative_error(p.grad, q.grad) for p, q in pairs)


def test_a_slow_rank_is_only_slow(pool):
    assert max(pool(4).run(slow_rank)) < 2e-5


def store() -> dist.Store:
    """The store in which all ranks have met."""
    return dist.distributed_c10d._get_default_store()


def failing(kind: str, environment: dict[str, str]) -> tuple[str, float]:
    """The error on this rank, and the seconds until it was raised."""
    os.environ.update(environment)
    try:
        extension.configure(settings.load())  # also for the ops, in which other ranks may wait
        grid = Grid(**SHAPE.as_dict())  # shares nothing with grids that failed before
        model = models.build(LLAMA, grid, seed=2)
        with Orchestrator(model) as orchestrator:
            loss_of(model).backward()
            orchestrator.sync_gradients()
            began = time.monotonic()
            try:
                spoil(kind, model, grid.rank)
                loss_of(model).backward()
                orchestrator.sync_gradients()
            except RuntimeError as error:
                if kind == "stuck" and grid.rank == 0:
                    store().set("stuck/given up", "")
                return str(error), time.monotonic() - began
        return "no error", 0.0
    finally:
        for name in environment:
            del os.environ[name]


def spoil(kind: str, model: Any, rank: int) -> None:
    """Makes rank 1's next step differ from the other ranks'."""
    if rank != 1:
        return
    middle = model.blocks[1].attention.out
    if kind == "dies":
        middle.register_full_backward_hook(lambda *_: os._exit(7))
    elif kind == "stuck":
        middle.register_full_backward_hook(lambda *_: store().wait(["stuck/given up"]))
    elif kind == "order":
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    else:
        model.blocks[0].forward = lambda x, *_: x


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """Ranks, some of which die in the last test."""
    pool = WorkerPool(4)
    yield pool
    pool.close()


def about(message: str) -> bool:
    """Whether an error of the orchestrator, or of an op that waited for a rank, names the axis."""
    return bool(re.search(r"axis (z|data), rank \d|(z|data) \(ranks ", message))


@pytest.mark.parametrize("kind", ["order", "module"])
def test_a_rank_that_diverges_is_named_before_it_does_harm(ranks, kind):
    environment = {"AXONN_TIMEOUT_SECONDS": "10", "AXONN_DEBUG_COLLECTIVES": "1"}
    messages = [message for message, _ in ranks.run(failing, kind, environment)]
    assert all(map(about, messages)), messages
    assert "axis z, rank 0 (ranks 0, 1): " in messages[0]
    assert "axis z, rank 1 (ranks 0, 1): " in messages[1]
    assert "rank 1 differs: its number" in messages[0] and "blocks." in messages[0]
    assert "rank 0 differs: its number" in messages[1] and "for forward" in messages[1]
    assert "another rank issues" in messages[0] + messages[1]


def same_sizes_in_another_order() -> str:
    model = Shuffled(grid_of(SHAPE))
    with Orchestrator(model, Overlap(prefetch=0)) as orchestrator:
        if grid_of(SHAPE).rank == 1:
            model.order = [0, 2, 1, 3]
        model(torch.ones(4, 16)).sum().backward()
        try:
            orchestrator.sync_gradients()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_rank_whose_order_nothing_else_shows_is_named_at_the_end_of_the_step(ranks):
    messages = ranks.run(same_sizes_in_another_order)
    for rank, message in enumerate(messages[:2]):
        assert f"axis z, rank {rank} (ranks 0, 1): " in message
        assert "ranks have issued different collectives" in message
    assert all(map(about, messages)), messages


def test_a_rank_that_is_stuck_is_named_after_the_timeout(ranks):
    answers = ranks.run(failing, "stuck", {"AXONN_TIMEOUT_SECONDS": "5"})
    assert all(about(message) for message, _ in answers), answers
    message, seconds = answers[0]
    assert seconds >= 5
    assert "axis z, rank 0 (ranks 0, 1): " in message and ".weight" in message
    assert "not done after 5 s (AXONN_TIMEOUT_SECONDS)" in message
    assert "rank 1 gives no answer" in message or "rank 1 is behind" in message


def test_a_rank_that_dies_is_named_on_every_other(ranks):
    with pytest.raises(WorkerError, match="rank 1: the process ended"):
        ranks.run(failing, "dies", {})
    assert sorted(ranks.answers) == [0, 2, 3]
    assert all(about(message) for message, _ in ranks.answers.values()), ranks.answers
    message, _ = ranks.answers[0]
    assert "axis z, rank 0 (ranks 0, 1): " in message and ".weight" in message
    assert "rank 1 gives no answer" in message
    assert all(seconds < 25 for _, seconds in ranks.answers.values())
