"""The memory that fused ops keep between calls: its size, and how it is freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import axonn_ext
from axonn_ext.kernels import extension
from axonn_ext.verify.accuracy import check
from axonn_ext.verify.virtual import gathered
from gpu_in_software import OUT_OF_MEMORY, fail, only_in_software
from worker_pool import WorkerPool

pytestmark = pytest.mark.gpu

SHAPE = (256, 64, 192)
FRONT, PAGE = 132096, 2 << 20  # bytes of flags, and of the smallest allocation
MIB = 1 << 20


@pytest.fixture
def pool():
    """Two ranks whose workspaces no other test has used."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a GPU of sm_90 is needed for each of 2 ranks")
    pool = WorkerPool(2, device="cuda")
    yield pool
    pool.close()


def a_gather(
    shape: tuple[int, int, int] = SHAPE, *, in_turn: bool = False
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """A fused gather, and a function that checks its result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, others, want, torchs = gathered(size, shape, "rows", torch.bfloat16, seed=7)

    def call() -> Tensor:
        return torch.ops.axonn._fused_all_gather_matmul(
            shards[rank], others[rank], "rows", "copy_engine", 0,
            dist.group.WORLD.group_name, size, 60.0, 0, in_turn,
        )  # fmt: skip

    return call, lambda result: check(result, want[rank], torchs[rank])


def gather(shape: tuple[int, int, int] = SHAPE) -> None:
    call, check_it = a_gather(shape)
    check_it(call())


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph, result


def held() -> int:
    assert extension.cuda is not None
    return extension.cuda.symmetric_workspace_bytes()


def bytes_as_calls_grow() -> list[int]:
    sizes = []
    for rows in (64, 16384, 20480, 64):
        gather((rows, 64, 256))
        sizes.append(held())
    return sizes


def test_a_workspace_is_as_large_as_its_largest_call(pool):
    for sizes in pool.run(bytes_as_calls_grow):
        assert sizes == [PAGE - FRONT, 8 * MIB, 10 * MIB, 10 * MIB]


def freed_and_used_again() -> list[int]:
    gather()
    sizes = [held()]
    for _ in range(2):  # the second time there is nothing left to free
        axonn_ext.release_workspaces()
        sizes.append(held())
    gather()
    sizes.append(held())
    return sizes


def test_workspaces_are_released(pool):
    assert pool.run(freed_and_used_again) == [[PAGE - FRONT, 0, 0, PAGE - FRONT]] * 2


def replayed_behind_a_release() -> int:
    call, check_it = a_gather()
    check_it(call())
    graph, result = captured(call)
    axonn_ext.release_workspaces()
    result.zero_()
    graph.replay()
    check_it(result)
    check_it(call())
    return held()


def test_what_a_graph_uses_is_not_released(pool):
    assert pool.run(replayed_behind_a_release) == [PAGE - FRONT] * 2


def without_memory_on_rank_1() -> str:
    """A rank's error in a first call for which rank 1 lacks memory; the next call works."""
    if dist.get_rank() == 1:
        fail("cuMemCreate", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError) as error:
        gather()
    gather()
    return str(error.value)


@only_in_software
def test_all_ranks_hear_of_one_without_memory(pool):
    for heard in pool.run(without_memory_on_rank_1):
        assert "all_gather_matmul: rank 1 of group" in heard
        assert f"cannot allocate {PAGE} bytes of symmetric memory" in heard


def replays_in_turn() -> None:
    call, check_it = a_gather(in_turn=True)
    check_it(call())
    graph, result = captured(call)
    for _ in range(3):
        result.zero_()
        graph.replay()
        check_it(result)


@only_in_software
@pytest.mark.parametrize("order", ["kernels-first", "kernels-last", "any-order", "side-by-side"])
def test_a_graph_that_runs_its_branches_in_turn(monkeypatch, order):
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a GPU of sm_90 is needed for each of 2 ranks")
    monkeypatch.setenv("GPU_MACHINE_BRANCHES", order)
    pool = WorkerPool(2, device="cuda")
    try:
        pool.run(replays_in_turn)
    finally:
        pool.close()
