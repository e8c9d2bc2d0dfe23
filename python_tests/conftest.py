from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from worker_pool import WorkerPool


@pytest.fixture(scope="session", autouse=True)
def no_cache_on_disk() -> Iterator[None]:
    """Processes that tests start see no measurements of the user's, and leave none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXONN_CACHE_DIR", "")
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(world_size)`: the session's pool of that size, started at its first use."""
    pools: dict[int, WorkerPool] = {}

    def get(world_size: int) -> WorkerPool:
        if world_size in pools and not pools[world_size].usable:
            pools.pop(world_size).close()
        if world_size not in pools:
            pools[world_size] = WorkerPool(world_size)
        return pools[world_size]

    yield get
    for started in pools.values():
        started.close()
