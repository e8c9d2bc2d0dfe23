"""CrossEntropy against torch's in float64: on every grid, in every dtype, in place or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import nn
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.spec.grid import GridShape
from grids import every_grid, grid_of
from loss_cases import (
    DTYPES,
    KINDS,
    axonn,
    failures,
    make_labels,
    make_logits,
    op_failures,
    reference,
    spread_of,
)

LIMIT = 1e-12  # in float64, anything above this is not rounding
GROUP = ("nobody", 1, "auto")


def forward(logits: Tensor, labels: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    return axonn.cross_entropy_forward(logits, labels, 0, IGNORE_INDEX, in_place, *GROUP)


# --- Rows of one rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_equal_those_in_float64(dtype, in_place):
    found = op_failures("cpu", dtype, in_place=in_place)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_devices_without_a_kernel_compute_the_same(kind, dtype):
    """Calls the implementation for such devices on the CPU."""
    scan, write = (
        getattr(axonn, name).default._op_dk
        for name in ("_cross_entropy_scan", "_cross_entropy_gradient")
    )
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    for rows, columns in ((7, 33), (1, 1), (0, 5), (3, 2_000_000)):
        if columns > 100 and (kind, dtype) != ("random", torch.bfloat16):
            continue  # one case suffices for rows too long to be read together
        logits = make_logits(rows, columns, dtype, kind)
        labels = make_labels(logits)
        top, total, label_logit = scan(key, logits, labels, 0, IGNORE_INDEX)
        losses = torch.where(labels == IGNORE_INDEX, 0, top - label_logit + total.log())
        dy = torch.randn(rows, dtype=top.dtype)
        gradient = logits.clone()
        statistics = torch.stack([top, total])
        write(key, dy, gradient, labels, statistics, 0, IGNORE_INDEX, gradient)
        want = reference(logits, labels, dy)
        found = failures((losses, gradient), want, dy, spread=spread_of(logits))
        assert not found, (rows, columns, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_no_number_spoils_no_other(dtype):
    logits = torch.zeros(6, 40, dtype=dtype)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 3] = torch.nan
    labels = torch.tensor([1, 1, 1, IGNORE_INDEX, 1, IGNORE_INDEX])
    losses, statistics = forward(logits, labels)
    gradient = axonn.cross_entropy_backward(
        torch.ones_like(losses), logits, labels, statistics, 0, IGNORE_INDEX
    )
    assert losses.isnan().tolist() == [True, True, True, False, False, False]
    assert gradient.isnan().any(1).tolist() == [True, True, True, False, False, False]
    assert losses[3] == losses[5] == 0 and not gradient[3].any() and not gradient[5].any()


def test_a_large_offset_of_all_logits_costs_no_digits():
    """All logits are exact in fp32, whose spacing at 8192 is about 0.001."""
    logits = torch.randint(-32, 33, (50, 40)) / 8
    labels = torch.randint(40, (50,))
    near, far = (forward(logits + offset, labels)[0] for offset in (0, 8192))
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)


def strided(logits: Tensor) -> dict[str, Tensor]:
    """The same logits in other memory layouts."""
    rows, columns = logits.shape
    wide = torch.full((rows, columns + 3), 7.0, dtype=logits.dtype)
    wide[:, 1:-2] = logits
    return {
        "rows apart": wide[:, 1:-2],
        "transposed": logits.t().contiguous().t(),
        "every other": logits.repeat_interleave(2, 1)[:, ::2],
    }


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_not_contiguous(dtype, in_place):
    logits = make_logits(5, 37, dtype, "random")
    labels = make_labels(logits)
    dy = torch.ones(5, dtype=torch.float64)
    want = reference(logits, labels, dy)
    for name, x in strided(logits).items():
        leaf = x.detach().requires_grad_()
        losses, _ = forward(leaf.view_as(leaf), labels, in_place=in_place)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        found = failures((losses.detach(), gradient), want, dy, spread=spread_of(logits))
        assert not found, (name, found)
        overwritten = in_place and name == "rows apart"
        assert torch.equal(x, gradient if overwritten else logits), name
        if name == "rows apart":  # the memory between rows is untouched
            base = x._base
            assert (base[:, 0] == 7).all() and (base[:, -2:] == 7).all()


def test_int32_labels():
    logits = make_logits(5, 37, torch.float32, "random")
    labels = make_labels(logits)
    for got, want in zip(forward(logits, labels.int()), forward(logits, labels), strict=True):
        assert torch.equal(got, want)


def test_results_do_not_depend_on_the_number_of_threads():
    logits = make_logits(61, 5003, torch.bfloat16, "random")
    labels = make_labels(logits)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            losses, statistics = forward(logits, labels)
            operands = (torch.ones_like(losses), logits, labels, statistics, 0, IGNORE_INDEX)
            results.append((losses, statistics, axonn.cross_entropy_backward(*operands)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


# --- Errors of the ops ---------------------------------------------------------------------------


def test_ops_name_what_does_not_fit():
    x, labels = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    losses, statistics = forward(x, labels)
    transposed = torch.ones(8, 4).t()

    def backward(dy=losses, x=x, labels=labels, statistics=statistics):
        return axonn.cross_entropy_backward(dy, x, labels, statistics, 0, IGNORE_INDEX)

    calls: dict[str, Callable[[], object]] = {
        "cross_entropy_forward: logits has dtype Long": lambda: forward(x.long(), labels),
        "cross_entropy_forward: labels must be int64 or int32, got Fl": lambda: forward(x, x[:, 0]),
        r"shapes \[rows, columns\] and \[rows\], got \[4, 8\] and \[3\]": lambda: forward(
            x, labels[:3]
        ),
        "logits is on cpu but labels is on meta": lambda: forward(x, labels.to("meta")),
        "first_column must be at least 0, got -1": lambda: axonn.cross_entropy_forward(
            x, labels, -1, IGNORE_INDEX, False, *GROUP
        ),
        "group_size must be at least 1, got 0": lambda: axonn.cross_entropy_forward(
            x, labels, 0, IGNORE_INDEX, False, "nobody", 0, "auto"
        ),
        r"cross_entropy_backward: dy must have shape \[4\], got \[3\]": lambda: backward(
            losses[:3]
        ),
        "cross_entropy_backward: dy has dtype Double, expected Float": lambda: backward(
            losses.double()
        ),
        r"statistics must have shape \[2, 4\], got \[4\]": lambda: backward(statistics=losses),
        r"cross_entropy_backward_: logits must have rows of neighb.*got strides \[1, 4\]": (
            lambda: axonn.cross_entropy_backward_(
                losses, transposed, labels, statistics, 0, IGNORE_INDEX
            )
        ),
        "in_place=True needs logits that were computed, got a leaf": lambda: forward(
            x.clone().requires_grad_(), labels, in_place=True
        ),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()


# --- In place ------------------------------------------------------------------------------------


@pytest.fixture
def leaf() -> Tensor:
    return make_logits(6, 21, torch.float32, "random").requires_grad_()


def test_in_place_the_gradient_lies_where_the_logits_lay(leaf):
    labels = make_labels(leaf.detach())
    want = reference(leaf.detach(), labels, torch.ones(6))
    logits = leaf * 1.0
    losses, _ = forward(logits, labels, in_place=True)
    got = torch.autograd.grad(losses.sum(), logits)[0]
    assert got.data_ptr() == logits.data_ptr() and torch.equal(got, logits)
    assert not failures((losses.detach(), got), want, torch.ones(6), spread=20)
    again = leaf * 1.0
    forward(again, labels, in_place=False)[0].sum().backward()
    assert torch.equal(leaf.grad, got) and torch.equal(again, leaf)


MODIFIED = "modified by an inplace operation"


def test_in_place_a_second_backward_is_an_error(leaf):
    labels = make_labels(leaf.detach())
    total = forward(leaf * 1.0, labels, in_place=True)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=MODIFIED):
        total.backward()


def test_in_place_a_second_backward_is_an_error_also_where_hooks_keep_the_logits(leaf):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        total = forward(leaf * 1.0, make_labels(leaf.detach()), in_place=True)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in_place=True backward can run once only"):
        total.backward()


def test_not_in_place_a_second_backward_is_right(leaf):
    total = forward(leaf * 1.0, make_labels(leaf.detach()))[0].sum()
    total.backward(retain_graph=True)
    first = leaf.grad.clone()
    total.backward()
    assert torch.equal(leaf.grad, 2 * first)


@pytest.mark.parametrize("other", ["loss", "loss in place", "saves", "saves nothing"])
@pytest.mark.parametrize("loss_first", [True, False])
def test_in_place_what_else_uses_the_logits(leaf, other, loss_first):
    """Backward runs in the reverse order of forward. It may fail, but no gradient is ever wrong."""
    labels = make_labels(leaf.detach())
    logits = leaf * 1.0
    uses = {
        "loss": lambda: forward(logits, labels)[0].sum(),
        "loss in place": lambda: forward(logits, labels, in_place=True)[0].sum(),
        "saves": lambda: logits.square().sum(),
        "saves nothing": lambda: (2 * logits).sum(),
    }
    parts = [lambda: forward(logits, labels, in_place=True)[0].sum(), uses[other]]
    total = sum(part() for part in (parts if loss_first else parts[::-1]))
    fails = other == "loss in place" or (other != "saves nothing" and not loss_first)
    if fails:
        with pytest.raises(RuntimeError, match=MODIFIED):
            total.backward()
        return
    total.backward()
    wide = leaf.detach().double()
    _, want = reference(wide, labels, torch.ones(6))
    want = (
        want + {"loss": want, "saves": 2 * wide, "saves nothing": torch.full_like(wide, 2)}[other]
    )
    assert torch.allclose(leaf.grad.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_derivative_is_refused(leaf, in_place):
    total = forward(leaf * 1.0, make_labels(leaf.detach()), in_place=in_place)[0].sum()
    (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"cross_entropy_backward: .*create_graph=False"):
        gradient.sum().backward()


# --- Grids ---------------------------------------------------------------------------------------


def draw_batch(rows: int, vocab: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = make_logits(rows, vocab, dtype, kind)
    return logits, make_labels(logits)


def grid_failures(layout: str, in_place: bool) -> list[str]:
    """The failures of the module on every grid of the world, in float64."""
    found = []
    for grid in every_grid():
        loss_of = nn.CrossEntropy(grid=grid, layout=layout, in_place=in_place)
        axes = ("data", "z", "y") if layout == "sharded" else ("data", "z")
        # One column per rank, an odd number, and many; some ranks' rows have no label.
        for columns, rows in ((1, 1), (7, 3), (300, 2)):
            for kind in KINDS:
                vocab, all_rows = columns * grid.size("x"), rows * dist.get_world_size()
                logits, labels = draw_batch(all_rows, vocab, kind, torch.float64)
                wide = logits.clone().requires_grad_()
                want = torch.nn.functional.cross_entropy(wide, labels)
                want.backward()
                leaf = grid.shard(logits, {0: axes, 1: ("x",)}).requires_grad_()
                loss = loss_of(leaf * 1.0, grid.shard(labels, {0: axes}))
                loss.backward()
                own = grid.shard(wide.grad, {0: axes, 1: ("x",)})
                error = max((loss - want).abs().item() / max(1.0, want.item()),
                            (leaf.grad - own).abs().max().item())  # fmt: skip
                if not error < LIMIT:
                    found.append(f"{grid.shape} {columns} columns, {kind}: {error:.1e}")
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_torch_on_every_grid(pool, world_size, layout, in_place):
    for found in pool(world_size).run(grid_failures, layout, in_place):
        assert not found, "\n".join(found)


def split_failures(dtype: torch.dtype) -> list[str]:
    """The failures for rows whose columns are split over all ranks."""
    size = dist.get_world_size()
    grid = grid_of(GridShape(x=size))
    axis = grid.axis("x")
    found = []
    for kind in KINDS:
        logits, labels = draw_batch(9, 301 * size, kind, dtype)
        if kind == "infinite":
            logits[:, : 301 * (size - 1)] = -torch.inf  # all columns of all ranks but one
            labels[labels >= 0] = 301 * (size - 1)
            logits[:, 301 * (size - 1)] = 1.0
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dy = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=wide)
        want = reference(logits, labels, dy)
        own = logits.chunk(size, 1)[axis.rank].contiguous()
        for algorithm in ("fused", "sequential", "auto"):
            place = (axis.rank * 301, IGNORE_INDEX)
            losses, statistics = axonn.cross_entropy_forward(
                own, labels, *place, False, axis.name, size, algorithm
            )
            gradient = axonn.cross_entropy_backward(dy, own, labels, statistics, *place)
            part = (want[0], want[1].chunk(size, 1)[axis.rank])
            wrong = failures((losses, gradient), part, dy, spread=spread_of(logits))
            found += [f"{kind} {algorithm} {dtype}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_columns_of_several_ranks(pool, world_size, dtype):
    for found in pool(world_size).run(split_failures, dtype):
        assert not found, "\n".join(found)


def empty_loss() -> tuple[float, list[int]]:
    grid = grid_of(GridShape(x=dist.get_world_size()))
    leaf = torch.zeros(0, 3, requires_grad=True)
    loss = nn.CrossEntropy(grid=grid)(leaf, torch.zeros(0, dtype=torch.long), 1.0)
    loss.backward()
    return loss.item(), list(leaf.grad.shape)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_rows(pool, world_size):
    assert pool(world_size).run(empty_loss) == [(0.0, [0, 3])] * world_size
