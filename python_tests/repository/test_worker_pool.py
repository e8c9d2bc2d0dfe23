"""The worker pools of the tests: a pool that does not start, and new groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from worker_pool import WorkerPool, pools_of_module


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def refuse(world_size: int) -> WorkerPool:
    raise OSError(f"{world_size} ranks do not start")


def test_a_pool_that_does_not_start_is_reported_as_such() -> None:
    with pools_of_module({}, refuse) as get, pytest.raises(OSError, match="2 ranks do not start"):
        get(2)


def test_ranks_join_one_world_after_another() -> None:
    pool = WorkerPool(2)
    try:
        for _ in range(3):
            assert pool.run(sum_of_ranks) == [1.0, 1.0]
            pool.renew_groups()
    finally:
        pool.close()
