"""collectives.all_to_all: rows, gradients, and errors if ranks differ."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import GridShape
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from grids import grid_of

# SEND[i][j] rows go from rank i to rank j of three.
SEND = [[1, 2, 0], [0, 0, 3], [2, 1, 1]]


def exchanged(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows that this rank receives, which encode their sender, and the sent rows' gradient."""
    axis = grid_of(GridShape(y=3)).axis("y")
    send, receive = SEND[axis.rank], [row[axis.rank] for row in SEND]
    rows = torch.arange(sum(send), dtype=torch.float64) + 10 * axis.rank
    sent = rows[:, None].repeat(1, 2).to(dtype).requires_grad_()
    got = collectives.all_to_all(sent, axis, send=send, receive=receive)
    (got * (axis.rank + 1)).sum().backward()
    return got.detach().double(), sent.grad.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_go_where_they_shall_and_gradients_come_back(pool, dtype):
    for rank, (got, grad) in enumerate(pool(3).run(exchanged, dtype)):
        want = [
            10.0 * sender + sum(counts[:rank]) + i
            for sender, counts in enumerate(SEND)
            for i in range(counts[rank])
        ]
        assert got[:, 0].tolist() == want and torch.equal(got[:, 0], got[:, 1])
        back = [float(to + 1) for to, count in enumerate(SEND[rank]) for _ in range(count)]
        assert grad[:, 0].tolist() == back


def refused() -> list[str]:
    axis, messages = grid_of(GridShape(y=2)).axis("y"), []
    for send, receive in (([1, 2], [2, 2]), ([2, 2, 0], [2, 2]), ([2, 2], [4])):
        with pytest.raises(ValueError) as error:
            collectives.all_to_all(torch.ones(4, 1), axis, send=send, receive=receive)
        messages.append(str(error.value))
    return messages


def test_numbers_that_cannot_be_are_refused(pool):
    for messages in pool(2).run(refused):
        assert all("must have 2 numbers each, and send must add" in text for text in messages)
        assert "input.size(0)=4, got [1, 2] and [2, 2]" in messages[0]


def alone() -> tuple[str, float]:
    """The error, and its time, if rank 0 exchanges and rank 1 does not take part."""
    axis = Grid(y=2).axis("y")
    start = time.monotonic()
    if axis.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AXONN_TIMEOUT_SECONDS", "2")
            with pytest.raises(RuntimeError) as error:
                collectives.all_to_all(torch.ones(2, 1), axis, send=[1, 1], receive=[1, 1])
        dist.distributed_c10d._get_default_store().set("all_to_all/error", "")
        return str(error.value), time.monotonic() - start
    dist.distributed_c10d._get_default_store().wait(["all_to_all/error"])
    return "", 0.0


def test_a_peer_that_does_not_come_is_an_error_in_time(pool):
    message, seconds = pool(2).run(alone)[0]
    assert "all_to_all along y (2 ranks, this is number 0): a peer died, did not come" in message
    assert seconds >= 2
