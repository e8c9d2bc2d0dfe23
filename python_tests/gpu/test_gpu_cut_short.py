"""Fused calls interrupted by an error of CUDA or NCCL: later calls are correct, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.kernels import extension
from axonn_ext.verify.accuracy import check
from axonn_ext.verify.virtual import WORKSPACE, draw, gathered
from gpu_in_software import NCCL_SYSTEM_ERROR, OUT_OF_MEMORY, counted, fail, only_in_software
from worker_pool import WorkerPool

pytestmark = [pytest.mark.gpu, only_in_software]

COPY, DESCRIPTOR = "cudaMemcpyAsync", "cuTensorMapEncodeTiled"
SHAPE = (256, 64, 192)


@pytest.fixture
def cuda() -> object:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels of these calls are for sm_90")
    return extension.cuda


def test_copies_that_fail_are_joined(cuda):
    """Otherwise the next call overwrites rows that a copy of the failed call still reads."""
    link = cuda.EmulatedLink(2, workspace_bytes=WORKSPACE)
    shards, others, want, torchs = gathered(2, (512, 64, 64), "rows", torch.bfloat16, seed=1)
    shards = shards[:1] + [shard.cpu().pin_memory() for shard in shards[1:]]

    def call() -> Tensor:
        return link.all_gather_matmul(shards, others[0])

    call()
    count = counted(COPY, call)
    assert count > 2
    for n in range(count):
        fail(COPY, OUT_OF_MEMORY, skipped=n)
        with pytest.raises(RuntimeError, match=COPY):
            call()
        check(call(), want[0], torchs[0])


def cut_short_on_one_stream() -> list[bool]:
    """For each interrupted call, whether the next one, on another stream, is correct."""
    shards, others, _, _ = gathered(1, SHAPE, "rows", torch.bfloat16, seed=7)
    group = dist.group.WORLD.group_name

    def call() -> Tensor:
        return torch.ops.axonn._fused_all_gather_matmul(
            shards[0], others[0], "rows", "copy_engine", 0, group, 1, 5.0
        )

    right = call().cpu()
    first, second, found = torch.cuda.Stream(), torch.cuda.Stream(), []
    for n in range(counted(COPY, call)):
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            fail(COPY, OUT_OF_MEMORY, skipped=n)
            with pytest.raises(RuntimeError, match=COPY):
                call()
        with torch.cuda.stream(second):
            again = call()
        torch.cuda.synchronize()
        found.append(torch.equal(again.cpu(), right))
    return found


def test_a_call_that_is_cut_short_is_in_front_of_the_next(cuda, gpu_pool):
    [right] = gpu_pool(1).run(cut_short_on_one_stream)
    assert right and all(right)


def gathers_over_nccl() -> list[str]:
    """The errors of two calls; the first fails to send on rank 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, others, _, _ = gathered(size, SHAPE, "rows", torch.bfloat16, seed=7)
    group = dist.group.WORLD.group_name

    def call() -> None:
        torch.ops.axonn._fused_all_gather_matmul(
            shards[rank], others[rank], "rows", "nccl", 16, group, size, 3.0
        )

    call()
    torch.cuda.synchronize()
    if rank == 1:
        fail("ncclSend", NCCL_SYSTEM_ERROR)
    heard = []
    for _ in range(2):
        try:
            call()
            heard.append("")
        except RuntimeError as error:
            heard.append(str(error))
    return heard


def test_a_gather_over_nccl_that_is_cut_short_is_followed_by_none(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("a GPU is needed for each of 2 ranks")
    pool = WorkerPool(2, device="cuda")  # a new one, as its communicators are lost
    try:
        _, (first, second) = pool.run(gathers_over_nccl)
    finally:
        pool.close()
    assert "unhandled system error" in first
    assert "cut short on this rank" in second


def test_descriptors_that_the_driver_refuses(cuda):
    a = draw(64, 64, seed=1, dtype=torch.bfloat16)
    want = cuda.gemm(a, a)
    count = counted(DESCRIPTOR, lambda: cuda.gemm(a, a))
    assert count > 2  # for A, B and the result
    for n in range(count):
        fail(DESCRIPTOR, 1, skipped=n)  # CUDA_ERROR_INVALID_VALUE
        with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
            cuda.gemm(a, a)
        assert torch.equal(cuda.gemm(a, a), want)
