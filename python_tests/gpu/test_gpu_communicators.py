"""Our NCCL communicators on GPUs: what they compute, in which order, and how they fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape, _library, communicators
from grids import grid_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_library.cuda is None, reason="the CUDA parts are not built"),
]

COUNT = 1000  # no multiple of anything that a kernel likes
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def connected(shape: GridShape, **environment: str) -> Iterator[communicators.CommunicatorGrid]:
    with mock.patch.dict(os.environ, environment):
        grid = communicators.connect(grid_of(shape), torch.cuda.current_device())
    try:
        yield grid
    finally:
        grid.close()


def values_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (count,), generator=random).to(dtype)


def check_collectives(shape: GridShape, axis: str) -> list[str]:
    """What differs from its definition, on one axis of a grid."""
    members = dist.get_process_group_ranks(grid_of(shape).group(axis))
    size, rank = len(members), members.index(dist.get_rank())
    wrong = []
    with connected(shape) as grid:
        lane = grid.axis(axis)
        assert (lane.rank, lane.size) == (rank, size)
        for dtype in DTYPES:
            parts = [values_of(r, COUNT, dtype) for r in members]
            wide = [values_of(r, COUNT * size, dtype) for r in members]
            own, whole = parts[rank].cuda(), wide[rank].cuda()
            gathered, block = torch.empty_like(whole), torch.empty_like(own)
            total, largest = torch.empty_like(own), torch.empty_like(own)
            calls = [
                lane.all_gather(gathered, own),
                lane.reduce_scatter(block, whole),
                lane.all_reduce(total, own),
                lane.all_reduce(largest, own, "max"),
            ]
            for call in calls:
                call.wait()
            stacked = torch.stack(parts)
            results = {
                "all_gather": (gathered, torch.cat(parts)),
                "reduce_scatter": (block, torch.stack(wide).sum(0).chunk(size)[rank]),
                "sum": (total, stacked.sum(0)),
                "max": (largest, stacked.amax(0)),
            }
            wrong += [
                f"{n} {dtype}" for n, (a, b) in results.items() if not torch.equal(a.cpu(), b)
            ]
        grid.check()
    return wrong


@pytest.mark.parametrize(
    ("shape", "axis"),
    [(GridShape(x=2), "x"), (GridShape(z=4), "z"), (GridShape(x=2, data=2), "data")],
)
def test_every_collective(gpu_pool, shape, axis):
    assert gpu_pool(shape.size).run(check_collectives, shape, axis) == [[]] * shape.size


def pass_around() -> list[float]:
    """Each rank sends to the next and receives from the one before, in one group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with connected(GridShape(x=size)) as grid:
        lane = grid.axis("x")
        mine, received = torch.full((COUNT,), float(rank)).cuda(), torch.empty(COUNT).cuda()
        lane.group_start()
        lane.send(mine, (rank + 1) % size)
        lane.receive(received, (rank - 1) % size)
        lane.group_end().wait()
        return received.unique().tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_send_and_receive(gpu_pool, world_size):
    received = gpu_pool(world_size).run(pass_around)
    assert received == [[float((rank - 1) % world_size)] for rank in range(world_size)]


def overwrite_at_once() -> list[bool]:
    """Writes an input as soon as the call was waited for, and drops tensors before it ends."""
    size = dist.get_world_size()
    right = []
    with connected(GridShape(x=size)) as grid:
        lane = grid.axis("x")
        for step in range(20):
            own = torch.full((1 << 20,), float(step), device="cuda")
            total = torch.empty_like(own)
            call = lane.all_reduce(total, own)
            call.wait()
            own.fill_(-1)
            dropped = torch.ones(1 << 20, device="cuda")
            lane.all_reduce(dropped, dropped)
            del dropped
            torch.zeros(1 << 20, device="cuda")  # would lie where `dropped` was
            right.append(bool((total == size * step).all()))
    return right


def test_ordered_with_the_current_stream(gpu_pool):
    for right in gpu_pool(2).run(overwrite_at_once):
        assert all(right)


def pass_wrong_tensors() -> None:
    with connected(GridShape(x=2)) as grid:
        lane, own = grid.axis("x"), torch.ones(4, device="cuda")
        with pytest.raises(ValueError, match="input must be a contiguous tensor on cuda"):
            lane.all_reduce(own, own.cpu())
        with pytest.raises(ValueError, match="output has 4 elements and input 4, expected a ratio"):
            lane.all_gather(own, own)
        with pytest.raises(TypeError, match="output has dtype Double but input has Float"):
            lane.all_reduce(own.double(), own)
        with pytest.raises(ValueError, match="peer=2 must be another rank"):
            lane.send(own, 2)
        grid.check()


def test_wrong_tensors(gpu_pool):
    gpu_pool(2).run(pass_wrong_tensors)


def differ() -> str:
    """What a rank hears if the other issues something else, where calls are compared."""
    with connected(GridShape(x=2), AXONN_DEBUG_COLLECTIVES="1") as grid:
        lane, own = grid.axis("x"), torch.ones(4 + dist.get_rank(), device="cuda")
        try:
            lane.all_reduce(own, own)
        except RuntimeError as error:
            return str(error)
    return ""


def test_ranks_that_differ(gpu_pool):
    for message in gpu_pool(2).run(differ):
        assert "axis x" in message and "all_reduce" in message and "rank 1" in message


def come_late() -> tuple[str, float]:
    """What a rank hears, and when, if the other stays away longer than the timeout."""
    with connected(GridShape(x=2), AXONN_TIMEOUT_SECONDS="3") as grid:
        lane, own = grid.axis("x"), torch.ones(4, device="cuda")
        began = time.monotonic()
        try:
            if dist.get_rank() == 0:
                lane.all_reduce(own, own)
            while time.monotonic() - began < 30:
                grid.check()
                time.sleep(0.1)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def test_a_rank_that_stays_away(gpu_pool):
    for message, seconds in gpu_pool(2).run(come_late):
        assert "axis x" in message and "rank 1" in message
        assert 2 < seconds < 20
