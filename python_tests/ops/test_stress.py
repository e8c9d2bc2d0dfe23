"""Ten thousand fused calls back to back, ranks delayed at random: no wrong bit, nothing grows.

The references are made on one rank from every rank's inputs, by the same library calls in the same
order as the fused ops promise, so that results must be equal to the last bit.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import axonn_ext
from axonn_ext import Grid

WORLD = 4
NUM_CASES = 50
NUM_CALLS = 10_000
WARM_UP_CALLS = 4 * NUM_CASES
LOW_PRECISION = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float32, torch.float64, *LOW_PRECISION)
ops = torch.ops.axonn


@dataclass(frozen=True)
class Case:
    """An op on this rank's inputs, and what it must return here."""

    name: str
    inputs: tuple[Tensor, ...]
    arguments: tuple[object, ...]  # between the tensors and the group
    expected: Tensor

    def run(self, group: str) -> Tensor:
        op = getattr(ops, self.name)
        options = (True,) if self.name == "matmul_all_reduce" else ()  # deterministic
        return op(*self.inputs, *self.arguments, group, WORLD, "fused", *options)


# --- Fixed-order references, from the inputs of all ranks -----------------------------------------


def in_order(addends: list[Tensor]) -> Tensor:
    """The sum in rank order, accumulated in fp32 (fp64 for fp64)."""
    wide = torch.float64 if addends[0].dtype == torch.float64 else torch.float32
    total = addends[0].to(wide)
    for addend in addends[1:]:
        total = total + addend.to(wide)
    return total.to(addends[0].dtype)


def sum_of_products(lefts: list[Tensor], rights: list[Tensor], gathered: int) -> Tensor:
    """sum_i lefts[i] @ rights[i] as the ops make it where the inner dimension comes in parts.

    gathered: elements of the whole factor that is gathered. The parts are joined for bfloat16 and
    float16, and where copying them costs less than adding to the product once more for each.
    """
    product = lefts[0].shape[0] * rights[0].shape[1]
    if lefts[0].dtype in LOW_PRECISION or 2 * gathered // WORLD < 2 * product:
        return torch.cat(lefts, 1) @ torch.cat(rights, 0)
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return total


def all_gather_matmul(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    shards, b = [a for a, _ in inputs], inputs[rank][1]
    if dim == 0:
        if 2 * shards[0].numel() < b.numel():  # copying a part costs less than packing b once more
            return torch.cat(shards) @ b
        return torch.cat([shard @ b for shard in shards])
    return sum_of_products(shards, list(b.chunk(WORLD, 0)), WORLD * shards[0].numel())


def matmul_all_gather_rhs(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    a, shards = inputs[rank][0], [b for _, b in inputs]
    if dim == 1:
        if 2 * shards[0].numel() < a.numel():
            return a @ torch.cat(shards, 1)
        return torch.cat([a @ shard for shard in shards], 1)
    return sum_of_products(list(a.chunk(WORLD, 1)), shards, WORLD * shards[0].numel())


def rows_of_product(a: Tensor, b: Tensor) -> list[Tensor]:
    """Every rank's rows of a @ b, multiplied one by one if they are many, as tensor_split cuts."""
    if a.shape[0] < WORLD * 512:
        return list((a @ b).tensor_split(WORLD))
    return [rows @ b for rows in a.tensor_split(WORLD)]


def matmul_reduce_scatter(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    if dim == 0:
        return in_order([rows_of_product(a, b)[rank] for a, b in inputs])
    return in_order([a @ b.chunk(WORLD, 1)[rank] for a, b in inputs])


def matmul_all_reduce(inputs: list[tuple[Tensor, ...]], rank: int) -> Tensor:
    products = [torch.cat(rows_of_product(a, b)) for a, b in inputs]
    return in_order(products)


def all_gather(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    return torch.cat([shard for (shard,) in inputs], dim)


def reduce_scatter(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    return in_order([t for (t,) in inputs]).chunk(WORLD, dim)[rank]


def all_reduce(inputs: list[tuple[Tensor, ...]], rank: int, reduce_op: str) -> Tensor:
    tensors = [t for (t,) in inputs]
    return in_order(tensors) if reduce_op == "sum" else torch.stack(tensors).amax(0)


REFERENCES = (
    all_gather_matmul,
    matmul_all_gather_rhs,
    matmul_reduce_scatter,
    matmul_all_reduce,
    all_gather,
    reduce_scatter,
    all_reduce,
)


# --- Cases ----------------------------------------------------------------------------------------


def make_case(seed: int, rank: int) -> Case:
    """Case number `seed`: its sizes are the same on all ranks, its inputs every rank's own."""
    pick = random.Random(seed)
    reference = REFERENCES[seed % len(REFERENCES)]
    dtype = pick.choice(DTYPES)
    m, k, n = (WORLD * pick.choice((1, 3, 8, 17, 40)) for _ in range(3))
    if pick.random() < 0.25:
        m, k, n = WORLD * 530, WORLD * 4, WORLD * 3  # each rank's rows are a matmul of their own
    dim = pick.randrange(2)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "all_gather_matmul": [(m, k // WORLD) if dim else (m // WORLD, k), (k, n)],
        "matmul_all_gather_rhs": [(m, k), (k, n // WORLD) if dim else (k // WORLD, n)],
    }
    shape = shapes.get(
        reference.__name__, [(m, k), (k, n)] if "mat" in reference.__name__ else [(m, k)]
    )
    arguments: tuple[object, ...] = (dim,)
    if reference is matmul_all_reduce:
        arguments = ()
    elif reference is all_reduce:
        arguments = (pick.choice(("sum", "max")),)
    inputs = []
    for source in range(WORLD):
        generator = torch.Generator().manual_seed(1000 * seed + source)
        inputs.append(tuple(torch.randn(s, generator=generator).to(dtype) for s in shape))
    expected = reference(inputs, rank, *arguments)
    return Case(reference.__name__, inputs[rank], arguments, expected)


def resources() -> tuple[int, int, int]:
    """(bytes of memory resident here, open descriptors, bytes of symmetric memory)."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    in_use = axonn_ext.symmetric_memory_bytes_in_use()
    return resident, len(os.listdir("/proc/self/fd")), in_use


def stress(seed: int) -> tuple[list[str], tuple[int, int, int], tuple[int, int, int]]:
    grid = Grid(x=WORLD)
    group = grid.axis("x").name
    rank = dist.get_rank()
    cases = [make_case(i, rank) for i in range(NUM_CASES)]
    draw = random.Random(seed)  # the same on all ranks
    delay = random.Random(1000 * seed + rank)
    wrong = []
    for call in range(-WARM_UP_CALLS, NUM_CALLS):
        if call == 0:
            before = resources()
        # Warm-up: each case in both halves of the workspace, which alternate.
        number = draw.randrange(NUM_CASES) if call >= 0 else call // 2 % NUM_CASES
        if (chance := delay.random()) < 0.02:
            time.sleep(chance * 0.05)  # up to a millisecond: longer than any call takes
        if not torch.equal(cases[number].run(group), cases[number].expected):
            wrong.append(f"call {call}: case {number}, {cases[number].name}")
    return wrong, before, resources()


def test_ten_thousand_calls_with_delays_are_right_to_the_last_bit_and_nothing_grows(pool) -> None:
    for wrong, before, after in pool(WORLD).run(stress, 7):
        assert wrong == []
        # Connections of grids that other tests had may still be closing.
        assert after[1] <= before[1] and after[2] == before[2]
        # Python's own objects come and go; a leak of one result a call would be 100 MB.
        assert after[0] - before[0] < 8 << 20
