"""The flags after copies are raised by the stream's queue, or by the copy engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.kernels import extension
from axonn_ext.verify.accuracy import check
from axonn_ext.verify.virtual import gathered
from gpu_in_software import counted, only_in_software
from worker_pool import WorkerPool

pytestmark = [pytest.mark.gpu, only_in_software]

WRITE = "cuStreamWriteValue32"
SHAPE = (256, 64, 192)


def flags_written_by_the_queue() -> list[int]:
    """Numbers for a call before a graph, its capture, two replays, and a call after them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, others, want, torchs = gathered(size, SHAPE, "rows", torch.bfloat16, seed=7)
    group = dist.group.WORLD.group_name

    def call() -> Tensor:
        return torch.ops.axonn._fused_all_gather_matmul(
            shards[rank], others[rank], "rows", "copy_engine", 0, group, size, 60.0
        )

    results, graph = [call()], torch.cuda.CUDAGraph()
    counts = [counted(WRITE, lambda: results.append(call()))]
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results.append(call())

    counts += [counted(WRITE, act) for act in (capture, graph.replay, graph.replay)]
    counts.append(counted(WRITE, lambda: results.append(call())))
    for result in results:
        check(result, want[rank], torchs[rank])
    return counts


@pytest.mark.parametrize(
    "driver, writes_to_peers, flags",
    [
        ("13000", "work", [1, 0, 0, 0, 0]),
        ("13000", "refused", [0] * 5),
        ("13000", "ignored", [0] * 5),
        ("13010", "ignored", [0] * 5),  # CUDA 13.1 does not support such writes
    ],
)
def test_queues_write_flags_where_the_driver_can_until_a_graph_counts_calls(
    monkeypatch, driver, writes_to_peers, flags
):
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a GPU of sm_90 is needed for each of 2 ranks")
    assert extension.cuda is not None  # the extension has the op
    monkeypatch.setenv("GPU_MACHINE_DRIVER", driver)
    monkeypatch.setenv("GPU_MACHINE_REMOTE_WRITES", writes_to_peers)
    pool = WorkerPool(2, device="cuda")  # a new one, as graphs have captured calls in others
    try:
        found = pool.run(flags_written_by_the_queue)
    finally:
        pool.close()
    assert found == [flags] * 2
