"""ZeRO with frozen parameters, several dtypes or missing gradients, and wrong uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import zero_edge_cases
from axonn_ext import GridShape
from axonn_ext.overlap.exchange import LaneExchange
from worker_pool import WorkerPool
from zero_edge_cases import Usage

Pool = Callable[[int], WorkerPool]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "usage",
    [
        Usage(1),
        Usage(1, "cpu", overlap=True),
        Usage(2, bucket_elements=300),
        Usage(2, "disk", overlap=True),
        Usage(2, "cpu", overlap=True, bucket_elements=1),
    ],
    ids=str,
)
def test_steps_at_random(pool: Pool, usage: Usage, seed: int) -> None:
    """Sums are exact here, so all bits equal those of a training without any of the options."""
    assert pool(2).run(zero_edge_cases.compare, GridShape(data=2), usage, seed) == [[], []]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("missing", [0, 4])
def test_gradients_of_different_parameters(
    pool: Pool, missing: int, zero: int, overlap: bool
) -> None:
    """One bucket has all gradients, so ranks differ only in its content."""
    usage = Usage(zero, overlap=overlap, bucket_elements=1 << 20)
    for said in pool(2).run(zero_edge_cases.differing_gradients, usage, missing):
        if overlap:
            assert "ranks have issued different collectives" in said
        else:
            assert "must compute gradients of the same parameters" in said


def test_a_rank_without_any_gradient(pool: Pool) -> None:
    assert all(pool(2).run(zero_edge_cases.differing_gradients, Usage(1), None))


def test_sums_that_a_part_of_a_stage_begins(pool: Pool) -> None:
    """The table on both end stages is summed over them first, whichever module is synced."""
    for whole, part_first in pool(4).run(zero_edge_cases.sums_of_a_part, GridShape(pipe=2, data=2)):
        assert part_first == whole


def test_orchestrator_of_a_part_of_the_model(pool: Pool) -> None:
    for whole, part in pool(4).run(zero_edge_cases.orchestrator_of_a_part):
        assert part == pytest.approx(whole, rel=1e-6)


def test_life_of_an_optimizer(pool: Pool) -> None:
    for found in pool(2).run(zero_edge_cases.life_of_an_optimizer):
        assert found["same"] and found["pickled"] is None
        assert "is not summed over the ranks; with zero, call sync_gradients" in found["step"]
        assert found["left"] == []


def test_graphs_are_refused() -> None:
    exchange = LaneExchange({"data": cast(Any, SimpleNamespace(capturing=True))}, cast(Any, None))
    with pytest.raises(RuntimeError, match="a CUDA graph cannot capture sums in parts"):
        exchange.reduce_scatter(torch.ones(4), "w.grad")
