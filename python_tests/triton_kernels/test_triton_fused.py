"""The fused Triton kernels in the interpreter: ranks are processes that share memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from axonn_ext.triton.tile_configs import TileConfig
from triton_interpreter import Interpreter

pytestmark = pytest.mark.triton

# Where it is not told otherwise, tiles straddle shards, and the last chunk is ragged.
BY_DESCRIPTOR = TileConfig(16, 16, 16, 4, 2, descriptors=True)
WIDE = TileConfig(32, 16, 16, 4, 2)
WORLDS = [(2, "fp32"), (2, "bf16"), (2, "fp16"), (4, "bf16")]


@pytest.fixture
def cases(interpreter: Interpreter) -> Callable[..., Any]:
    """`cases(function, world_size, rows, n, k, **fields)`: a function of triton_fused_cases."""

    def run(function: str, *sizes: int, **fields: Any) -> Any:
        return interpreter.run(_call, function, sizes, fields)

    return run


def _call(function: str, sizes: tuple[int, ...], fields: dict[str, Any]) -> Any:
    module = importlib.import_module("triton_fused_cases")
    return getattr(module, function)(module.FusedCase(*sizes, **fields))


@pytest.mark.parametrize(("world_size", "dtype"), WORLDS)
def test_all_gather_matmul(cases, world_size, dtype):
    assert cases("run_all_gather", world_size, 37, 17, 20, dtype=dtype) == []


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((2, 32, 48, 32), {"dtype": "bf16", "config": BY_DESCRIPTOR, "layout": "NT"}),
        ((2, 24, 32, 48), {"dtype": "fp16", "config": BY_DESCRIPTOR, "chunks": 1}),
        ((2, 40, 17, 16), {"config": WIDE, "chunks": 3, "layout": "NT"}),
        ((4, 1, 5, 3), {"chunks": 3}),  # tiles over all shards; chunks without rows
        ((4, 5, 1, 1), {"chunks": 1}),
        ((1, 20, 16, 16), {}),
        ((2, 0, 4, 4), {}),
        ((2, 4, 0, 4), {}),
        ((2, 4, 4, 0), {}),
    ],
)
def test_all_gather_matmul_of_any_shape(cases, sizes, fields):
    assert cases("run_all_gather", *sizes, **fields) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_chunks_may_arrive_in_any_order(cases, world_size):
    assert cases("gather_orders", world_size, 40, 17, 16, chunks=3) == []
    assert cases("reduce_orders", world_size, 40, 17, 16, chunks=3, dtype="bf16") == []


def test_a_tile_waits_for_the_next_chunk_where_it_begins_in_one_that_is_there(cases):
    # Programs take tiles one below the other; the second of these ends in another chunk.
    fields = {"chunk_tile": 48, "config": WIDE, "pause_s": 0.1}
    assert cases("gather_orders", 2, 96, 64, 16, **fields) == []


# A flag counts calls in 32 bits: its sign changes, and it begins anew.
@pytest.mark.parametrize("first_epoch", [2**31 - 2, 2**32 - 2])
def test_epochs_wrap_around(cases, first_epoch):
    fields = {"first_epoch": first_epoch, "calls": 4}
    assert cases("run_all_gather", 2, 20, 16, 16, **fields) == []
    assert cases("run_reduce_scatter", 2, 20, 16, 16, **fields) == []


@pytest.mark.parametrize(("world_size", "dtype"), WORLDS)
def test_matmul_reduce_scatter(cases, world_size, dtype):
    assert cases("run_reduce_scatter", world_size, 37, 17, 20, dtype=dtype) == []


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((2, 32, 48, 32), {"dtype": "bf16", "config": BY_DESCRIPTOR, "layout": "NT"}),
        ((2, 24, 32, 48), {"dtype": "fp16", "config": BY_DESCRIPTOR, "layout": "TN"}),
        ((2, 40, 17, 16), {"config": WIDE, "chunk_tile": 32, "layout": "NT"}),
        ((2, 40, 17, 16), {"layout": "TN", "chunks": 3}),
        ((4, 1, 5, 3), {"chunks": 3}),
        ((4, 5, 1, 1), {"chunks": 1}),
        ((1, 20, 16, 16), {}),
        ((2, 0, 4, 4), {}),
        ((2, 4, 0, 4), {}),
        ((2, 4, 4, 0), {}),
    ],
)
def test_matmul_reduce_scatter_of_any_shape(cases, sizes, fields):
    assert cases("run_reduce_scatter", *sizes, **fields) == []


def test_reduce_scatter_gives_the_same_bits_whatever_arrives_first(cases):
    assert cases("repeat_reduce_scatter", 4, 20, 17, 33, dtype="bf16", calls=2) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("push(rows[:3])", "push_shard: shard must be a contiguous torch.float32 [4, 8], got "
         "torch.float32 [3, 8] with strides (8, 1)"),
        ("push(rows, chunk_tile=0)", "push_shard: chunk_tile must be positive, got 0"),
        ("push(rows, gathered=gathered[0])", "push_shard: gathered must be [2, M, K] of contiguous "
         "halves, got [8, 8] with strides (8, 1)"),
        ("push(rows, pointers=pointers[:1])", "push_shard: gathered_ptrs must be a contiguous "
         "tensor of at least 2 torch.int64 on cpu, got torch.int64 [1] on cpu"),
        ("gather(gathered[:, :7], b)", "all_gather_matmul: gathered.size(1)=7 must be divisible by "
         "the group size 2"),
        ("gather(gathered, b[:5])", "all_gather_matmul: gathered[0].size(1) must be b.size(0), "
         "got (8, 8) and (5, 6)"),
        ("gather(gathered, b, rank=2)", "all_gather_matmul: rank must be 0 to 1, got 2 of 2"),
        ("gather(gathered, b, chunks_per_shard=0)", "all_gather_matmul: chunks_per_shard must be "
         "positive, got 0"),
        ("gather(gathered, b, chunks_per_shard=2)", "all_gather_matmul: flags must be a contiguous "
         "tensor of at least 128 torch.int32 on cpu, got torch.int32 [2, 32] on cpu"),
        ("gather(gathered, b, timeout_ns=0)", "all_gather_matmul: timeout_ns must be positive, got "
         "0"),
        ("send(gathered[0], b, chunk_tile=8)", "multiply_and_send: chunk_tile must be a positive "
         "multiple of 16, got 8"),
        ("send(gathered[0, :7], b)", "multiply_and_send: a.size(0)=7 must be divisible by the "
         "group size 2"),
        ("send(gathered[0], b[:, :5])", "multiply_and_send: slots must be [2, 2, 'S', 'N'] with "
         "S=4, N=5, of contiguous halves and a dtype of bfloat16, float16, float32, got "
         "torch.float32 [2, 2, 4, 6] with strides (48, 24, 6, 1)"),
        ("send(gathered[0], b, slots=slots.half())", "multiply_and_send: slots must be "
         "torch.float32, got torch.float16"),
        ("add_up(slots, chunk_tile=24)", "reduce_slots: chunk_tile must be a positive multiple of "
         "16, got 24"),
    ],
)  # fmt: skip
def test_what_is_refused(interpreter, call, message):
    assert interpreter.run(_error_of, call) == message


def _error_of(call: str) -> str:
    """What a call of a launcher, with good arguments but for those given, raises."""
    cases = importlib.import_module("triton_fused_cases")
    ranks = cases.Ranks(cases.FusedCase(2, 4, 6, 8, chunks=1), 2, 8, 8)
    pointers = ranks.pointers(ranks.buffers)
    slots = torch.zeros(2, 2, 4, 6)

    def push(rows, *, chunk_tile=16, gathered=ranks.buffers[0], pointers=pointers):
        cases.push_shard(rows, gathered, pointers, ranks.signals(0), chunk_tile=chunk_tile)

    def gather(gathered, b, **changes):
        signals = replace(ranks.signals(0), **changes)
        cases.all_gather_matmul(gathered, b, signals, chunk_tile=16)

    def send(a, b, *, slots=slots, chunk_tile=16):
        signals = ranks.signals(0)
        cases.multiply_and_send(a, b, slots, pointers, signals, chunk_tile=chunk_tile)

    def add_up(slots, *, chunk_tile=16):
        cases.reduce_slots(slots, ranks.signals(0), chunk_tile=chunk_tile)

    names = {"rows": torch.zeros(4, 8), "b": torch.zeros(8, 6), "gathered": ranks.buffers[0]}
    names |= {"push": push, "gather": gather, "send": send, "add_up": add_up}
    try:
        eval(call, {**names, "pointers": pointers, "slots": slots})
    except ValueError as error:
        return str(error)
    return ""


def test_a_chunk_that_does_not_come_is_named(cases):
    [message] = cases("gather_without_a_peer", 2, 40, 16, 16, chunks=2)
    assert message == (
        "all_gather_matmul: rank 0 gave up waiting for chunk 1 of rank 1, which did not arrive in "
        "time"
    )
    [message] = cases("reduce_without_a_peer", 2, 40, 16, 16, chunks=2)
    assert message == (
        "reduce_slots: rank 0 gave up waiting for chunk 0 of rank 1, which did not arrive in time"
    )
