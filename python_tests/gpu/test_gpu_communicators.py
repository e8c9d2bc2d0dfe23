"""Our NCCL communicators on GPUs: their results, order and failures."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape
from axonn_ext.kernels import extension
from axonn_ext.ranks.communicators import Communicators
from axonn_ext.spec.grid import SUM_ORDER
from grids import grid_of
from limits import HANG_SECONDS
from worker_pool import WorkerPool

if TYPE_CHECKING:
    from axonn_ext._cuda import CommunicatorGrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(extension.cuda is None, reason="the CUDA parts are not built"),
]

COUNT = 1000  # not a multiple of typical block sizes
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


@contextmanager
def connected(
    shape: GridShape, *, max_ctas: int = 0, **environment: str
) -> Iterator[CommunicatorGrid]:
    """Communicators made only for this test."""
    grid = grid_of(shape)
    axes = {a: dist.get_process_group_ranks(grid.group(a)) for a in SUM_ORDER if grid.size(a) > 1}
    communicators = Communicators(axes)
    with mock.patch.dict(os.environ, environment):
        device = torch.device("cuda", torch.cuda.current_device())
        made = communicators.get(device, required=True, max_ctas=max_ctas)
    assert made is not None
    try:
        yield made
    finally:
        communicators.close()


def values_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (count,), generator=random).to(dtype)


def check_collectives(shape: GridShape, axis: str, max_ctas: int) -> list[str]:
    """The collectives on one axis of a grid that differ from their definitions."""
    members = dist.get_process_group_ranks(grid_of(shape).group(axis))
    size, rank = len(members), members.index(dist.get_rank())
    wrong = []
    with connected(shape, max_ctas=max_ctas) as grid:
        lane = grid.axis(axis)
        for dtype in DTYPES:
            parts = [values_of(r, COUNT, dtype) for r in members]
            wide = [values_of(r, COUNT * size, dtype) for r in members]
            own, whole = parts[rank].cuda(), wide[rank].cuda()
            gathered, exchanged = torch.empty_like(whole), torch.empty_like(whole)
            total = torch.empty_like(own)
            calls = [
                lane.all_gather(gathered, own),
                lane.all_to_all(exchanged, whole),
                lane.all_reduce(total, own),
            ]
            for call in calls:
                call.wait()
            results = {
                "all_gather": (gathered, torch.cat(parts)),
                "all_to_all": (exchanged, torch.cat([w.chunk(size)[rank] for w in wide])),
                "all_reduce": (total, torch.stack(parts).sum(0)),
            }
            wrong += [
                f"{n} {dtype}" for n, (a, b) in results.items() if not torch.equal(a.cpu(), b)
            ]
        grid.check()
    return wrong


@pytest.mark.parametrize("max_ctas", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [(GridShape(x=2), "x"), (GridShape(z=4), "z"), (GridShape(x=2, data=2), "data")],
)
def test_every_collective(gpu_pool, shape, axis, max_ctas):
    wrong = gpu_pool(shape.size).run(check_collectives, shape, axis, max_ctas)
    assert wrong == [[]] * shape.size


def overwrite_at_once() -> list[bool]:
    """Overwrites an input right after waiting for its call, and frees tensors before calls end."""
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
            torch.zeros(1 << 20, device="cuda")  # would get the memory of `dropped`
            right.append(bool((total == size * step).all()))
    return right


def test_ordered_with_the_current_stream(gpu_pool):
    for right in gpu_pool(2).run(overwrite_at_once):
        assert all(right)


def keep_a_tensor() -> bool:
    """Starts a call without waiting for it, and keeps its tensor longer than the communicators."""
    kept = torch.ones(1 << 20, device="cuda")
    with connected(GridShape(x=dist.get_world_size())) as grid:
        grid.axis("x").all_reduce(kept, kept)
        torch.cuda.synchronize()
        del grid
    gc.collect()
    del kept
    again = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    return not again.any().item()


def test_a_tensor_outlives_the_communicators(gpu_pool):
    assert gpu_pool(2).run(keep_a_tensor) == [True, True]


def connect_alone() -> tuple[str, float]:
    """Rank 0 waits for a rank that does not connect; returns the error, and a result of CUDA."""
    if dist.get_rank() != 0:
        return "", 2.0
    assert extension.cuda is not None
    heard = ""
    try:
        extension.cuda.CommunicatorGrid(
            dist.group.WORLD.group_name, [("x", [0, 1])], device=torch.cuda.current_device(),
            max_ctas=0, compare_calls=False, timeout_seconds=1.0,
        )  # fmt: skip
    except RuntimeError as error:
        heard = str(error)
    return heard, (torch.ones(4, device="cuda") + 1).mean().item()


def test_a_rank_that_does_not_connect_leaves_cuda_as_it_was():
    pool = WorkerPool(2, device="cuda")  # a new one, as its ranks will differ in their grids
    try:
        (heard, computed), _ = pool.run(connect_alone)
    finally:
        pool.close()
    assert "connecting 2 ranks: not done" in heard
    assert computed == 2.0


def pass_wrong_tensors() -> None:
    with connected(GridShape(x=2)) as grid:
        lane, own = grid.axis("x"), torch.ones(4, device="cuda")
        with pytest.raises(ValueError, match="input must be a contiguous tensor on cuda"):
            lane.all_reduce(own, own.cpu())
        with pytest.raises(ValueError, match="output has 4 elements and input 4, expected a ratio"):
            lane.all_gather(own, own)
        with pytest.raises(TypeError, match="output has dtype Double but input has Float"):
            lane.all_reduce(own.double(), own)
        odd = torch.ones(3, device="cuda")
        with pytest.raises(ValueError, match="input has 3 elements, expected a block for each"):
            lane.all_to_all(torch.empty_like(odd), odd)
        with pytest.raises(ValueError, match="output must have memory of its own"):
            lane.all_to_all(own, own)
        with pytest.raises(ValueError, match="axis z has no communicator"):
            grid.axis("z")
        grid.check()


def test_wrong_tensors(gpu_pool):
    gpu_pool(2).run(pass_wrong_tensors)


def differ() -> str:
    """A rank's error if the other issues a different call, with comparison of calls enabled."""
    heard = ""
    try:
        with connected(GridShape(x=2), AXONN_DEBUG_COLLECTIVES="1") as grid:
            lane, own = grid.axis("x"), torch.ones(4 + dist.get_rank(), device="cuda")
            try:
                lane.all_reduce(own, own)
            except RuntimeError as error:
                heard = str(error)
    except RuntimeError:  # of `close`, after a failure
        pass
    return heard


def test_ranks_that_differ(gpu_pool):
    for message in gpu_pool(2).run(differ):
        assert "axis x" in message and "all_reduce" in message and "rank 1" in message


def come_late() -> tuple[str, float]:
    """A rank's error, and its time, if the other stays away longer than the timeout."""
    heard, seconds = "", 0.0
    try:
        with connected(GridShape(x=2), AXONN_TIMEOUT_SECONDS="3") as grid:
            lane, own = grid.axis("x"), torch.ones(4, device="cuda")
            began = time.monotonic()
            try:
                if dist.get_rank() == 0:
                    lane.all_reduce(own, own)
                while time.monotonic() - began < HANG_SECONDS:
                    grid.check()
                    time.sleep(0.1)
            except RuntimeError as error:
                heard, seconds = str(error), time.monotonic() - began
    except RuntimeError:  # of `close`, after a failure
        pass
    return heard, seconds


def test_a_rank_that_stays_away(gpu_pool):
    for message, seconds in gpu_pool(2).run(come_late):
        assert "axis x" in message and "rank 1" in message
        assert seconds > 2
