"""Deferred weight gradients of one Linear: when and from what they are computed, and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from axonn_ext import Grid, GridShape, trace_communication
from axonn_ext.nn import DeferredWeightGradients, Linear
from grids import grid_of

ROWS, SIZE = 8, 16


def linear(grid: Grid | None = None, **options: object) -> Linear:
    options = {"role": "expand", "dtype": torch.float64} | options
    return Linear(SIZE, SIZE, grid=grid or grid_of(GridShape()), **options)


def rows(seed: int, num_rows: int = ROWS, num_features: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_features, generator=generator, dtype=torch.float64)


def same_gradients(layer: Linear, run: Callable[[Linear], None]) -> None:
    """Asserts that the layer's gradients equal those of `run` on a copy with normal backward."""
    other = copy.deepcopy(layer)
    assert other.deferral is None
    other.zero_grad()
    run(other)
    assert torch.equal(layer.weight.grad, other.weight.grad)
    assert torch.equal(layer.bias.grad, other.bias.grad)


# --- When collectives are issued ------------------------------------------------------------------


def collectives(shape: GridShape, options: dict[str, object]) -> list[set[tuple[str, str]]]:
    """The collectives of backward, and those of `run`."""
    layer = linear(grid_of(shape), **options)
    x = layer.grid.shard(rows(1), layer.input_dims).requires_grad_()
    with DeferredWeightGradients(layer).collecting() as later:
        y = layer(x)
    phases = []
    for phase in (lambda: y.backward(layer.grid.shard(rows(2), layer.output_dims)), later.run):
        with trace_communication() as trace:
            phase()
        phases.append({(r.axis, r.collective) for r in trace.records})
    return phases


GATHER_X, GATHER_Z, SCATTER_Z = ("x", "all_gather"), ("z", "all_gather"), ("z", "reduce_scatter")


@pytest.mark.parametrize(
    ("options", "backward", "run"),
    [
        ({}, {GATHER_Z, ("x", "reduce_scatter")}, {GATHER_X, SCATTER_Z}),
        ({"save_gathered": True}, {GATHER_Z, ("x", "reduce_scatter")}, {SCATTER_Z}),
        ({"reshard_after_forward": False}, {("x", "reduce_scatter")}, {GATHER_X, SCATTER_Z}),
        ({"role": "contract"}, {GATHER_Z, GATHER_X}, {GATHER_X, SCATTER_Z}),
        ({"layout": "replicated"}, {GATHER_Z, ("x", "all_reduce")}, {SCATTER_Z}),
    ],
)
def test_collectives_of_each_phase(pool, options, backward, run):
    for found in pool(4).run(collectives, GridShape(x=2, z=2), options):
        assert found == [backward, run]


# --- What is kept ---------------------------------------------------------------------------------


def kept_bytes() -> None:
    first, second = linear(name="first"), linear(name="second")
    x = rows(1).requires_grad_()
    with DeferredWeightGradients(torch.nn.ModuleList([first, second])).collecting() as later:
        y = first(x) + second(x)
    assert later.num_bytes == 0
    y.backward(rows(2))
    assert later.num_bytes == 2 * ROWS * SIZE * 8  # both uses share x and dy
    later.run()
    assert later.num_bytes == 0


def several_backwards() -> None:
    """With several backwards of one forward pass, the gradient is their sum."""
    layer = linear()
    with DeferredWeightGradients(layer).collecting() as later:
        y = layer(rows(1).requires_grad_())
    y.backward(rows(2), retain_graph=True)
    y.backward(rows(3), retain_graph=True)
    later.run()
    same_gradients(layer, lambda other: other(rows(1)).backward(rows(2) + rows(3)))
    with pytest.raises(RuntimeError, match="run it after all backward passes"):
        y.backward(rows(4))


def input_without_gradient() -> None:
    """The first layer of a model, for example, has such an input."""
    layer = linear()
    with DeferredWeightGradients(layer).collecting() as later:
        y = layer(rows(1))
    y.backward(rows(2))
    assert layer.weight.grad is None and layer.bias.grad is None
    later.run()
    same_gradients(layer, lambda other: other(rows(1)).backward(rows(2)))


def autocast() -> None:
    layer = linear(dtype=torch.float32)
    x, dy = rows(1).float(), rows(2).bfloat16()
    with torch.autocast("cpu"):
        with DeferredWeightGradients(layer).collecting() as later:
            y = layer(x)
        want = copy.deepcopy(layer)(x)
    assert y.dtype == want.dtype == torch.bfloat16 and torch.equal(y, want)
    y.backward(dy)
    later.run()

    def run(other: Linear) -> None:
        with torch.autocast("cpu"):
            y = other(x)
        y.backward(dy)

    same_gradients(layer, run)


def not_deferred() -> None:
    """Frozen weights, no_grad, checkpoints with use_reentrant, and calls after `collecting`."""
    layer, frozen = linear(), linear(name="frozen")
    frozen.weight.requires_grad_(False)
    deferred = DeferredWeightGradients(torch.nn.ModuleList([layer, frozen]))
    x = rows(1).requires_grad_()
    with deferred.collecting() as later:
        y = checkpoint(lambda x: layer(x), frozen(x), use_reentrant=True)
        with torch.no_grad():
            layer(x)
    y.backward(rows(2))
    assert layer.weight.grad is not None and layer.bias.grad is not None
    assert frozen.weight.grad is None and frozen.bias.grad is not None
    later.run()  # has nothing to do
    layer.zero_grad()
    layer(x).backward(rows(2))
    same_gradients(layer, lambda other: other(x).backward(rows(2)))


def not_reached() -> None:
    used, unused = linear(name="used"), linear(name="unused")
    x = rows(1)
    with DeferredWeightGradients(torch.nn.ModuleList([used, unused])).collecting() as later:
        y = used(x)
        unused(x)
    y.backward(rows(2))
    later.run()
    assert unused.weight.grad is None
    same_gradients(used, lambda other: other(x).backward(rows(2)))


@pytest.mark.parametrize(
    "check",
    [kept_bytes, several_backwards, input_without_gradient, autocast, not_deferred, not_reached],
)
def test_one_process(pool, check):
    pool(1).run(check)


# --- Errors ---------------------------------------------------------------------------------------


def errors() -> None:
    layer = linear()
    deferred = DeferredWeightGradients(layer)
    with pytest.raises(ValueError, match="the module belongs to another one already"):
        DeferredWeightGradients(layer)
    x, dy = rows(1), rows(2)
    with deferred.collecting() as later:
        y = layer(x)
        with pytest.raises(RuntimeError, match="is being collected already"), deferred.collecting():
            pass
    with pytest.raises(RuntimeError, match=r"none of the 1 Linears .* run backward first"):
        later.run()
    y.backward(dy)
    later.run()
    with pytest.raises(RuntimeError, match="was called before"):
        later.run()
    for changed in (x, dy):
        with deferred.collecting() as later:
            y = layer(x)
        y.backward(dy)
        changed.zero_()
        with pytest.raises(RuntimeError, match="changed in place after backward"):
            later.run()
    with deferred.collecting():
        y = layer(x.clone().requires_grad_())
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    deferred.close()
    deferred.close()
    with pytest.raises(RuntimeError, match="after close"), deferred.collecting():
        pass
    DeferredWeightGradients(layer).close()
    layer.zero_grad()
    layer(x).backward(dy)
    assert layer.weight.grad is not None


def test_errors(pool):
    pool(1).run(errors)


def different_ranks(what: str) -> str:
    """The error if ranks defer different gradients."""
    layer = linear(Grid(z=2), layout="replicated")  # a new grid, as its groups become unusable
    is_first = layer.grid.rank == 0
    deferred = DeferredWeightGradients(layer)
    x = rows(1, ROWS // 2)
    try:
        if is_first or what == "needs":
            with deferred.collecting():
                y = layer(x.requires_grad_(is_first or what != "needs"))
        else:
            y = layer(x.requires_grad_())
        y.backward(rows(2, ROWS // 2))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["needs", "collects"])
def test_ranks_that_differ_get_an_error(pool, what):
    found = pool(2).run(different_ranks, what)
    assert all(found)  # one rank may only learn that the other has failed
    assert any(("requires_grad=x" if what == "needs" else "mask=1") in error for error in found)
