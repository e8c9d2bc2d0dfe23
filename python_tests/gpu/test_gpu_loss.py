"""Cross-entropy on GPUs: the kernels against float64, in place, on side streams, over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape, nn
from axonn_ext.bench.loss import peak_bytes
from axonn_ext.nn.loss import IGNORE_INDEX
from grids import grid_of
from loss_cases import DTYPES, axonn, make_labels, make_logits, op_failures, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_equal_those_in_float64(dtype, in_place):
    found = op_failures("cuda", dtype, in_place=in_place)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_anywhere(dtype):
    """Rows that are not aligned to 16 bytes, and gradients with a different alignment."""
    for first in range(9):
        for columns in (1, 7, 8, 9, 1001):
            whole = make_logits(3, columns + first + 1, dtype, "random").cuda()
            logits = whole[:, first : first + columns]
            labels = make_labels(logits.cpu()).cuda()
            losses, statistics = axonn.cross_entropy_forward(
                logits, labels, 0, IGNORE_INDEX, False, "nobody", 1, "auto"
            )
            dy = torch.ones_like(losses)
            operands = (labels, statistics, 0, IGNORE_INDEX)
            apart = axonn.cross_entropy_backward(dy, logits, *operands)
            before = whole.clone()
            axonn.cross_entropy_backward_(dy, logits, *operands)
            assert torch.equal(logits, apart), (first, columns)
            assert torch.equal(whole[:, :first], before[:, :first])
            assert torch.equal(whole[:, first + columns :], before[:, first + columns :])


def test_a_call_makes_no_copy_of_the_logits():
    logits = make_logits(512, 4096, torch.bfloat16, "random").cuda()
    labels = make_labels(logits.cpu()).cuda()
    leaf = logits.requires_grad_()

    def call(in_place: bool) -> None:
        computed = leaf.view_as(leaf)
        losses, _ = axonn.cross_entropy_forward(
            computed, labels, 0, IGNORE_INDEX, in_place, "nobody", 1, "auto"
        )
        torch.autograd.grad(losses.sum(), computed)

    rows_only = 64 * 512  # a few numbers per row
    assert peak_bytes(lambda: call(False), "cuda") <= logits.nbytes + rows_only
    assert peak_bytes(lambda: call(True), "cuda") <= rows_only


def errors_on_a_side_stream() -> tuple[float, float]:
    """The module's errors over x: of the loss, and of the gradient relative to its maximum."""
    size = dist.get_world_size()
    grid = grid_of(GridShape(x=size))
    logits = make_logits(64, 300 * size, torch.float64, "random")
    labels = make_labels(logits)
    count = int((labels != IGNORE_INDEX).sum())
    dy = torch.where(labels == IGNORE_INDEX, 0, torch.full((64,), 1 / count, dtype=torch.float64))
    want, want_gradient = reference(logits, labels, dy)
    own = grid.shard(logits, {1: ("x",)}).cuda().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = nn.CrossEntropy(grid=grid, algorithm="sequential", in_place=True)(
            own * 1.0, labels.cuda()
        )
        loss.backward()
    stream.synchronize()
    wanted = grid.shard(want_gradient, {1: ("x",)})
    error = (own.grad.cpu() - wanted).abs().max() / wanted.abs().max()
    return abs(loss.item() - float(want @ dy)), error.item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_over_ranks_and_on_a_side_stream(gpu_pool, world_size):
    for loss_error, gradient_error in gpu_pool(world_size).run(errors_on_a_side_stream):
        assert loss_error < 1e-12 and gradient_error < 1e-12
