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
from axonn_ext.verify import ranks
from matmul_facts import LOW_PRECISION, MATMULS, in_order

WORLD = 4
NUM_CASES = 50
NUM_CALLS = 10_000
WARM_UP_CALLS = 4 * NUM_CASES
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


def all_gather(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    return torch.cat([shard for (shard,) in inputs], dim)


def reduce_scatter(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    return in_order([t for (t,) in inputs]).chunk(WORLD, dim)[rank]


def all_reduce(inputs: list[tuple[Tensor, ...]], rank: int, reduce_op: str) -> Tensor:
    tensors = [t for (t,) in inputs]
    return in_order(tensors) if reduce_op == "sum" else torch.stack(tensors).amax(0)


REFERENCES = (*(facts.fused for facts in MATMULS.values()), all_gather, reduce_scatter, all_reduce)


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
    what = ranks.MATMULS.get(reference.__name__)
    shape = what.shapes(m, k, n, dim, WORLD) if what else [(m, k)]
    arguments: tuple[object, ...] = () if what and what.option is None else (dim,)
    if reference is all_reduce:
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
