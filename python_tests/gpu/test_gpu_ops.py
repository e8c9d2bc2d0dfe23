"""The ops on GPUs, over NCCL: values and gradients against float64, streams, graphs, `auto`.

If there are more ranks than GPUs, ranks share GPUs, and NCCL connects them by sockets.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import axonn_ext
from axonn_ext import ops
from axonn_ext.verify.ranks import OPS, op_failures
from grids import relative_error

pytestmark = pytest.mark.gpu

# M, K, N of one rank: ragged, empty and tile-sized; and one large enough to be split into chunks.
SHAPES = [(3, 5, 7), (33, 64, 129), (0, 4, 3), (4, 0, 3), (2, 3, 0), (128, 256, 128)]
CHUNKED_SHAPE = (2048, 2048, 4096)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ALGORITHMS = ["chunked", "sequential", "auto"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op, dim", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_gradients(gpu_pool, world_size, op, dim, algorithm):
    for failures in gpu_pool(world_size).run(op_failures, op, dim, algorithm, SHAPES, DTYPES):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("op, dim", OPS)
def test_matrices_that_are_cut_into_chunks(gpu_pool, op, dim):
    shapes = [CHUNKED_SHAPE]
    for failures in gpu_pool(2).run(op_failures, op, dim, "chunked", shapes, DTYPES):
        assert not failures, "\n".join(failures)


def check_fused_is_refused() -> None:
    """Checks errors where "fused" does not exist: plain collectives, float32, missing kernels."""
    a = torch.ones(4, 4, device="cuda")
    with pytest.raises(NotImplementedError, match="algorithm='fused' exists on cpu only"):
        torch.ops.axonn.all_reduce(a, "sum", dist.group.WORLD.group_name, 2, "fused")
    with pytest.raises(NotImplementedError, match=r"CUDA parts|no fused kernels|bfloat16 and"):
        ops.matmul_all_reduce(a, a, dist.group.WORLD, algorithm="fused")


@pytest.mark.parametrize("world_size", [2])
def test_fused_is_refused(gpu_pool, world_size):
    gpu_pool(world_size).run(check_fused_is_refused)


def check_side_stream(algorithm: str) -> list[float]:
    """Runs calls on a side stream, where each call may reuse the memory of the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (torch.randn(512, 512, device="cuda") + rank for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = torch.zeros(512 // size, 512, device="cuda")
        for _ in range(20):
            y = ops.matmul_reduce_scatter(a, b, dist.group.WORLD, algorithm=algorithm)
            total += y
            del y
        once = ops.matmul_reduce_scatter(a, b, dist.group.WORLD, algorithm=algorithm)
    stream.synchronize()
    return [relative_error(total.cpu() / 20, once.cpu())]


@pytest.mark.parametrize("algorithm", ["chunked", "sequential"])
def test_on_a_stream_of_the_users(gpu_pool, algorithm):
    for errors in gpu_pool(2).run(check_side_stream, algorithm):
        assert max(errors) < 1e-5


def check_graph(algorithm: str) -> list[float]:
    """Captures a forward and backward pass once, and replays it on other values."""
    group = dist.group.WORLD
    a = torch.randn(256, 128, device="cuda", requires_grad=True)
    b = torch.randn(128, 64, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = ops.all_gather_matmul(a, b, group, algorithm=algorithm)
        return (y, *torch.autograd.grad(y, (a, b), torch.ones_like(y)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    with torch.no_grad():
        a.mul_(2), b.sub_(1)
    graph.replay()
    return [relative_error(c.cpu(), e.cpu()) for c, e in zip(captured, step(), strict=True)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_captured_in_a_graph(gpu_pool, world_size, algorithm):
    for errors in gpu_pool(world_size).run(check_graph, algorithm):
        assert max(errors) < 1e-6


def check_auto_is_measured() -> list[tuple[str, str, tuple[str, ...]]]:
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    axonn_ext.tuning.clear()
    with axonn_ext.warm_up():
        ops.matmul_all_reduce(a, b, dist.group.WORLD)
    return [
        (choice.source, choice.algorithm, tuple(sorted(choice.median_us)))
        for choice in axonn_ext.tuning.choices()
        if "device=cuda" in choice.signature
    ]


def test_auto_is_measured_and_agreed(gpu_pool):
    choices = gpu_pool(2).run(check_auto_is_measured)
    assert choices[0] == choices[1]
    ((source, algorithm, measured),) = choices[0]
    assert source == "measured" and algorithm in measured
    assert measured == ("chunked", "sequential")


def dtype_under_autocast() -> torch.dtype:
    a = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return ops.matmul_all_reduce(a, a, dist.group.WORLD).dtype


@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_casts_the_operands(gpu_pool, world_size):
    assert set(gpu_pool(world_size).run(dtype_under_autocast)) == {torch.bfloat16}
