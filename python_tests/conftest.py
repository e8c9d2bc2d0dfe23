from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from triton_interpreter import Interpreter
from worker_pool import WorkerPool, pools_of_module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu, with the reason, if torch sees no GPU."""
    if torch.cuda.is_available():
        return
    missing = pytest.mark.skip(reason=f"no GPU: torch {torch.__version__} sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(missing)


@pytest.fixture(scope="session", autouse=True)
def no_cache_on_disk() -> Iterator[None]:
    """Processes that tests start neither read nor write the user's measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXONN_CACHE_DIR", "")
        yield


@pytest.fixture(autouse=True)
def gloo_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores gloo's default, which an earlier run in this process may have changed."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, WorkerPool]]:
    """The session's pools by world size, each started on first use."""
    started: dict[int, WorkerPool] = {}
    yield started
    for each in started.values():
        each.close()


@pytest.fixture(scope="module")
def pool(pools: dict[int, WorkerPool]) -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(world_size)`: the session's pool of this size, with new groups for this module."""
    with pools_of_module(pools) as get:
        yield get


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """The session's process that runs Triton's kernels in the interpreter."""
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Callable[[int], WorkerPool]]:
    """`gpu_pool(world_size)`: a pool over NCCL, with its ranks distributed over the GPUs."""
    pools: dict[int, WorkerPool] = {}

    def get(world_size: int) -> WorkerPool:
        if world_size in pools and pools[world_size].usable:
            return pools[world_size]
        # If the ranks of a pool share a GPU, idle pools would take turns on it, so they are closed.
        # Otherwise they are kept, as starting them takes long.
        share = max([world_size, *pools]) > torch.cuda.device_count()
        for number in [number for number in pools if share or number == world_size]:
            pools.pop(number).close()
        pools[world_size] = WorkerPool(world_size, device="cuda")
        return pools[world_size]

    yield get
    for started in pools.values():
        started.close()
