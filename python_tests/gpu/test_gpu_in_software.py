"""What tests can make the GPU in software do that a driver may do, too (docs/emulate_torch.md)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from axonn_ext import _library
from axonn_ext.verify.accuracy import check
from axonn_ext.verify.virtual import gathered
from gpu_in_software import only_in_software
from worker_pool import WorkerPool

pytestmark = [pytest.mark.gpu, only_in_software]

SHAPE = (256, 64, 192)


def write_to_peer() -> tuple[str, list[int]]:
    """What rank 0 or 1 hears as its stream writes to the other's GPU, and its own two words.

    It writes the first one itself, and the other rank the second one.
    """
    rank, write = dist.get_rank(), symm_mem._SymmetricMemory.stream_write_value32
    own = symm_mem.empty(2, dtype=torch.int32, device="cuda").zero_()
    handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
    peers = handle.get_buffer(1 - rank, (2,), torch.int32)
    dist.barrier()
    write(own, 0, 5)
    heard = ""
    try:
        write(peers, 1, 7)
    except RuntimeError as error:
        heard = str(error)
    torch.cuda.synchronize()
    dist.barrier()
    return heard, own.tolist()


@pytest.mark.parametrize(("remote_writes", "word"), [("work", 7), ("refused", 0), ("ignored", 0)])
def test_values_that_streams_write_to_another_gpu(monkeypatch, remote_writes: str, word: int):
    if torch.cuda.device_count() < 2:
        pytest.skip("a GPU is needed for each of 2 ranks")
    monkeypatch.setenv("GPU_MACHINE_REMOTE_WRITES", remote_writes)
    pool = WorkerPool(2, device="cuda")
    try:
        found = pool.run(write_to_peer)
    finally:
        pool.close()
    for heard, words in found:
        assert words == [5, word]
        assert bool(heard) == (remote_writes == "refused"), heard


def replay_a_gather() -> str:
    """What a fused gather in a graph raises when it is replayed; empty if its result is right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, others, want, torchs = gathered(size, SHAPE, "rows", torch.bfloat16, seed=7)
    group, graph = dist.group.WORLD.group_name, torch.cuda.CUDAGraph()

    def call() -> torch.Tensor:
        return torch.ops.axonn._fused_all_gather_matmul(
            shards[rank], others[rank], "rows", "copy_engine", 0, group, size, 1.0
        )

    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    try:
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    check(result, want[rank], torchs[rank])
    return ""


@pytest.mark.parametrize("branches", ["kernels-last", "kernels-first"])
def test_branches_that_run_one_after_the_other(monkeypatch, capfd, branches: str):
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a GPU of sm_90 is needed for each of 2 ranks")
    assert _library.cuda is not None  # it has the op
    monkeypatch.setenv("GPU_MACHINE_BRANCHES", branches)
    pool = WorkerPool(2, device="cuda")
    try:
        found = pool.run(replay_a_gather)
    finally:
        pool.close()
    if branches == "kernels-last":
        assert found == ["", ""]
    else:
        assert all("CUDA error" in heard for heard in found), found
        assert "waited in vain for rank" in capfd.readouterr().err
