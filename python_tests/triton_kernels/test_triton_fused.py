"""The fused Triton kernels in the interpreter: ranks are processes that share memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.library import Library

from axonn_ext.kernels.triton.tile_configs import TileConfig
from triton_interpreter import Interpreter

pytestmark = pytest.mark.triton

# By default, tiles straddle shards and chunks, and the last tile is ragged.
BY_DESCRIPTOR = TileConfig(16, 16, 16, 4, 2, descriptors=True)
WIDE = TileConfig(32, 16, 16, 4, 2)
DEEP = TileConfig(16, 16, 32, 4, 2)
FORMS = ["rows", "columns", "inner", "inner_a"]


@pytest.fixture
def cases(interpreter: Interpreter) -> Callable[..., Any]:
    """`cases(function, world_size, m, n, k, **fields)`: a function of triton_fused_cases."""

    def run(function: str, *sizes: int, **fields: Any) -> Any:
        return interpreter.run(_call, function, sizes, fields)

    return run


def _call(function: str, sizes: tuple[int, ...], fields: dict[str, Any]) -> Any:
    module = importlib.import_module("triton_fused_cases")
    return getattr(module, function)(module.FusedCase(*sizes, **fields))


def sizes_of(arriving: str, gathered: int, one: int, other: int) -> tuple[int, int, int]:
    """m, n and k of a product with `gathered` rows, columns or elements of k that are gathered."""
    if arriving == "rows":
        return gathered, one, other
    return (one, gathered, other) if arriving == "columns" else (one, other, gathered)


@pytest.mark.parametrize("arriving", FORMS)
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "bf16"), (2, "fp16"), (4, "bf16")])
def test_a_gather(cases, arriving, world_size, dtype):
    sizes = sizes_of(arriving, 84, 17, 20)
    assert cases("run_gather", world_size, *sizes, arriving=arriving, dtype=dtype) == []


@pytest.mark.parametrize("arriving", FORMS)
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((2, 64, 64, 64), {"config": BY_DESCRIPTOR, "layout": "NN"}),
        ((2, 64, 64, 96), {"config": BY_DESCRIPTOR, "layout": "TT", "chunks": 1}),
        ((2, 80, 80, 96), {"config": DEEP, "chunks": 3, "layout": "SS"}),
        ((4, 4, 4, 4), {"chunks": 1}),  # a tile touches all shards
        ((4, 8, 12, 8), {"chunks": 4}),  # chunks without rows
        ((1, 20, 16, 16), {}),
        ((2, 40, 40, 40), {"config": None}),
    ],
)
def test_a_gather_of_any_shape(cases, arriving, sizes, fields):
    assert cases("run_gather", *sizes, arriving=arriving, **fields) == []


@pytest.mark.parametrize("arriving", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_chunks_may_arrive_in_any_order(cases, arriving, world_size):
    fields = {"arriving": arriving, "chunks": 3, "programs": 2}
    assert cases("gather_orders", world_size, *sizes_of(arriving, 96, 32, 32), **fields) == []


@pytest.mark.parametrize("arriving", ["rows", "inner"])
def test_a_tile_waits_for_the_next_chunk_where_it_begins_in_one_that_is_there(cases, arriving):
    # A step of K, or every other tile, starts in one chunk and ends in the next.
    config = TileConfig(32, 16, 64, 4, 2)
    fields = {"arriving": arriving, "chunk_tile": 48, "config": config, "pause_s": 0.1}
    assert cases("gather_orders", 2, 192, 64, 192, **fields) == []


# A flag counts calls in 32 bits: its sign changes, and it wraps around.
@pytest.mark.parametrize("first_epoch", [2**31 - 2, 2**32 - 2])
def test_epochs_wrap_around(cases, first_epoch):
    fields = {"first_epoch": first_epoch, "calls": 4}
    assert cases("run_gather", 2, 40, 16, 16, **fields) == []
    assert cases("run_gather", 2, 16, 16, 40, arriving="inner", **fields) == []
    assert cases("run_scatter", 2, 64, 16, 16, **fields) == []


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "bf16"), (2, "fp16"), (4, "bf16")])
def test_a_scatter(cases, world_size, dtype):
    assert cases("run_scatter", world_size, world_size * 37, 17, 20, dtype=dtype) == []


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((2, 64, 48, 32), {"config": BY_DESCRIPTOR, "layout": "NT"}),
        ((2, 64, 32, 48), {"config": BY_DESCRIPTOR, "layout": "TN"}),
        ((2, 200, 17, 16), {"config": WIDE, "layout": "TT"}),
        ((2, 120, 17, 16), {"layout": "SS", "chunks": 3}),
        ((4, 4, 5, 3), {"chunks": 1}),
        ((3, 15, 1, 1), {"chunks": 1}),
        ((8, 64, 16, 16), {"chunks": 1, "calls": 2}),
        ((1, 40, 16, 16), {}),
        ((2, 80, 16, 16), {"config": None, "chunks": 1}),
    ],
)
def test_a_scatter_of_any_shape(cases, sizes, fields):
    assert cases("run_scatter", *sizes, **fields) == []


@pytest.mark.parametrize("arriving", FORMS)
def test_a_chunk_that_does_not_come_is_recorded(cases, arriving):
    # It is recorded as a SpinFailure; on a GPU, the kernel then destroys the context.
    fields = {"arriving": arriving, "first_epoch": 6, "timeout": 50}
    assert cases("gather_without_a_peer", 2, 80, 80, 80, **fields) == {
        "state": 2, "rank": 0, "peer": 1, "chunk": 1, "expected": 7, "seen": 6
    }  # fmt: skip


@pytest.mark.parametrize("arriving", ["rows", "columns"])
def test_a_tile_waits_for_the_chunk_in_which_it_ends(cases, arriving):
    # The missing chunk is in the last tile, which starts in a chunk that has arrived.
    fields = {"arriving": arriving, "chunk_tile": 52, "config": TileConfig(32, 32, 16, 4, 2),
              "programs": 1, "first_epoch": 6, "timeout": 50}  # fmt: skip
    record = cases("gather_without_a_peer", 2, *sizes_of(arriving, 160, 32, 16), **fields)
    assert (record["state"], record["peer"], record["chunk"]) == (2, 1, 1)


def through_the_ops() -> list[str]:
    """Calls the ops that csrc/ops/cuda/triton_gemm.cpp calls, here for CPU tensors."""
    register = importlib.import_module("axonn_ext.kernels.triton.register")
    cases = importlib.import_module("triton_fused_cases")
    library = Library("axonn", "IMPL")
    register.register_fused(library, "CPU")
    case = cases.FusedCase(1, 80, 48, 64, chunks=1, chunk_tile=1)
    try:
        gathers = [replace(case, arriving=arriving, chunks=3) for arriving in FORMS]
        found = [text for each in gathers for text in cases.gather_by_op(each)]
        return found + cases.scatter_by_op(case)
    finally:
        library._destroy()


def test_the_ops_that_are_registered(interpreter):
    assert interpreter.run(through_the_ops) == []
