"""The bits are the same for any order in which messages arrive."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from axonn_ext import GridShape, clip_grad_norm_, full_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.pipeline import Pipeline, PipelineOptions
from axonn_ext.pipeline.choice import MessageDriven
from axonn_ext.spec.parallel import Overlap
from limits import HANG_SECONDS
from pipeline_cases import config_of, make, own_batches

MEAN_DELAY_S = 0.004  # about as long as a stage computes


def delays(seed: int) -> Callable[[str, int, int], float]:
    def delay(direction: str, stage: int, micro_batch: int) -> float:
        text = f"{seed} {direction} {stage} {micro_batch}"
        return random.Random(text).expovariate(1 / MEAN_DELAY_S) if seed else 0.0

    return delay


def bits_and_orders(shape: GridShape, options: PipelineOptions, seeds: range) -> tuple[int, int]:
    """The numbers of different results, and of different orders of tasks, over the seeds."""
    model = make(config_of("gpt2", 4), shape, options, ParallelConfig())
    current = [0]
    results, orders = set(), set()
    with Pipeline(
        model, model.grid, options, delay=lambda *message: delays(current[0])(*message)
    ) as pipeline:
        for current[0] in seeds:
            loss = pipeline.step(own_batches(model.grid))
            orders.add(tuple(run.task for run in pipeline.stats.tasks))
            pipeline.sync_gradients()
            norm = clip_grad_norm_(model, 1.0)
            tensors = [loss, norm, *full_gradients(model).values()]
            results.add(b"".join(t.contiguous().numpy().tobytes()
                                 for t in tensors))  # fmt: skip
            model.zero_grad()
    return len(results), len(orders)


@pytest.mark.parametrize(
    ("count", "later"),
    [
        (12, True),
        pytest.param(200, False, marks=pytest.mark.slow),
        pytest.param(200, True, marks=pytest.mark.slow),
    ],
)
def test_delayed_messages_change_the_order_and_no_bit(pool, count, later) -> None:
    options = PipelineOptions(defer_weights=later)
    found = pool(4).run(
        bits_and_orders, GridShape(pipe=4), options, range(count), timeout_s=6 * HANG_SECONDS
    )
    assert [results for results, _ in found] == [1] * 4
    assert max(orders for _, orders in found) > 1, "the delays must have had an effect"


def test_where_all_has_come_a_backward_goes_before_a_forward() -> None:
    here: Any = SimpleNamespace(has=lambda message: True, decide=lambda choose: choose())
    order = MessageDriven(
        stage=0, stages=2, micro_batches=4, in_flight=4, inbox=here, leader=here, deferred=None
    )
    assert [task.kind for task in order] == ["forward", "backward"] * 4


@pytest.mark.slow
def test_ranks_of_a_stage_take_the_same_tasks(pool) -> None:
    options = PipelineOptions()
    found = pool(4).run(bits_and_orders, GridShape(pipe=2, x=2), options, range(40))
    assert [results for results, _ in found] == [1] * 4
    assert len({orders for _, orders in found[:2]}) == len({orders for _, orders in found[2:]}) == 1


def orders_and_mispredictions(seeds: range) -> tuple[int, int]:
    """The number of different orders of tasks, and of mispredicted orders of weights."""
    options, current = PipelineOptions(), [0]
    model = make(config_of("gpt2", 4), GridShape(pipe=2, z=2), options, ParallelConfig())
    batches = own_batches(model.grid) * 3  # enough to give a stage a choice
    orders = set()
    with Pipeline(
        model, model.grid, options, overlap=Overlap(prefetch=1, gathered_bytes=0),
        delay=lambda *message: delays(current[0])(*message),
    ) as pipeline:  # fmt: skip
        assert pipeline.orchestrator is not None
        for current[0] in seeds:
            pipeline.step(batches)
            pipeline.sync_gradients()
            model.zero_grad()
            orders.add(tuple(run.task for run in pipeline.stats.tasks))
        return len(orders), pipeline.orchestrator.num_mispredictions


def test_weights_are_prefetched_in_any_order_of_tasks(pool) -> None:
    found = pool(4).run(orders_and_mispredictions, range(5))
    assert max(orders for orders, _ in found) > 1, "the delays must have had an effect"
    assert [mispredicted for _, mispredicted in found] == [0] * 4
