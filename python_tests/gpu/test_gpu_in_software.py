"""Behavior of drivers that tests can request from the GPU in software (docs/gpu_machine.md)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from gpu_in_software import only_in_software
from worker_pool import WorkerPool

pytestmark = [pytest.mark.gpu, only_in_software]


def write_to_peer() -> tuple[str, list[int]]:
    """A rank's error as its stream writes to the other rank's GPU, and its own two words.

    The rank itself writes the first word, and the other rank the second.
    """
    rank, write = dist.get_rank(), symm_mem._SymmetricMemory.stream_write_value32
    own = symm_mem.empty(2, dtype=torch.uint32, device="cuda").zero_()
    handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
    peers = handle.get_buffer(1 - rank, (2,), torch.uint32)
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
