"""Random programs of calls in which ranks may differ in one call, and the expected outcomes.

Every rank draws the same case from its seed: a few calls that all ranks make, and one in which a
rank may deviate. This file states independently of the ops what ranks must agree on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import matmul_facts
from axonn_ext.verify import ranks

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
MATMULS = tuple(matmul_facts.MATMULS)
ALGORITHMS = ("fused", "chunked", "sequential", "auto")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVIATIONS = ("none", "order", "dtype", "shape", "gradient", "algorithm", "op")


@dataclass(frozen=True)
class CallSpec:
    """One call of one rank."""

    op: str
    sizes: tuple[int, int, int]  # M, K, N; for a gathered matrix, the sizes of its shard
    dim: int
    dtype: torch.dtype
    algorithm: str
    gradients: tuple[bool, bool]  # whether the first and the second operand require gradients
    reduce_op: str = "sum"
    seed: int = 0

    def contract(self) -> tuple[object, ...]:
        """What the ranks of a group must agree on for the call to be legal."""
        m, k, n = self.sizes
        shared: tuple[int, ...]
        gradients: tuple[bool, ...] = self.gradients
        algorithm = self.algorithm
        if self.op in COLLECTIVES:
            shared = (m, k)
            gradients = gradients[:1]
            algorithm = "c10d" if algorithm in ("chunked", "sequential") else "fused"
            if self.op == "all_reduce":
                shared = (m, k, self.reduce_op == "max")
                gradients = gradients if self.reduce_op == "sum" else ()
        else:
            shared = matmul_facts.sizes_moved(self.op, m, k, n)
            if len(matmul_facts.MATMULS[self.op].issued) == 1:
                gradients = ()
        dim = self.dim if self.op not in ("all_reduce", "matmul_all_reduce") else 0
        if algorithm == "auto":
            algorithm = "fused"  # the choice on one host, without measurements
        return (self.op, shared, dim, self.dtype, algorithm, gradients)

    def shapes(self, world: int) -> list[tuple[int, int]]:
        """The shapes of this rank's operands."""
        m, k, _ = self.sizes
        if self.op == "all_gather":
            return [(m, k)]
        if self.op == "reduce_scatter":
            return [(m * world, k) if self.dim == 0 else (m, k * world)]
        if self.op == "all_reduce":
            return [(m, k)]
        what = ranks.MATMULS[self.op]
        divided = what.divided[self.dim : self.dim + 1]
        whole = (
            size * (world if letter == divided else 1)
            for letter, size in zip("MKN", self.sizes, strict=True)
        )
        return list(what.shapes(*whole, self.dim, world))

    def arguments(self) -> tuple[object, ...]:
        """The arguments between the tensors and the group."""
        if self.op == "matmul_all_reduce":
            return ()
        return (self.reduce_op,) if self.op == "all_reduce" else (self.dim,)

    def options(self) -> tuple[object, ...]:
        """The arguments after the algorithm."""
        return (True,) if self.op == "matmul_all_reduce" else ()  # deterministic

    def operands(self, rank: int, world: int) -> list[Tensor]:
        """This rank's operands, without gradient history."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in self.shapes(world)
        ]


@dataclass(frozen=True)
class Case:
    """The calls of every rank, in order."""

    seed: int
    world: int
    programs: tuple[tuple[CallSpec, ...], ...]  # by rank
    backward: bool
    deviation: str

    def first_difference(self) -> int | None:
        """Index of the first call in which ranks differ; None: every rank's program is legal."""
        for i in range(len(self.programs[0])):
            if len({program[i].contract() for program in self.programs}) > 1:
                return i
        return None

    def is_certain(self) -> bool:
        """Whether the outcome is determined.

        It is not if a rank may ask by itself what `auto` stands for, because the others name an
        algorithm, or already know the answer for the size of their own operand.
        """
        for calls in zip(*self.programs, strict=True):
            automatic = {call.algorithm == "auto" for call in calls}
            if len(automatic) > 1 or (True in automatic and len({c.sizes for c in calls}) > 1):
                return False
        return True


def draw_call(pick: random.Random, seed: int) -> CallSpec:
    op = pick.choice(COLLECTIVES + MATMULS)
    sizes = tuple(pick.choice((1, 2, 3, 5, 8, 0 if pick.random() < 0.2 else 4)) for _ in range(3))
    return CallSpec(
        op=op, sizes=sizes, dim=pick.randrange(2), dtype=pick.choice(DTYPES),
        algorithm=pick.choice(ALGORITHMS),
        gradients=(pick.random() < 0.5, pick.random() < 0.5),
        reduce_op=pick.choice(("sum", "sum", "max")), seed=seed,
    )  # fmt: skip


def deviate(call: CallSpec, kind: str, pick: random.Random) -> CallSpec:
    """The same call with one change."""
    if kind == "dtype":
        return replace(call, dtype=pick.choice([d for d in DTYPES if d != call.dtype]))
    if kind == "shape":
        sizes = list(call.sizes)
        sizes[pick.randrange(3)] += pick.choice((1, 2))
        return replace(call, sizes=tuple(sizes))
    if kind == "gradient":
        gradients = list(call.gradients)
        which = pick.randrange(2)
        gradients[which] = not gradients[which]
        return replace(call, gradients=tuple(gradients))
    if kind == "algorithm":
        others = [a for a in ALGORITHMS if a != call.algorithm]
        return replace(call, algorithm=pick.choice(others))
    if kind == "op":
        return replace(call, op=pick.choice([o for o in COLLECTIVES + MATMULS if o != call.op]))
    return call


def draw_case(seed: int) -> Case:
    pick = random.Random(seed)
    world = pick.choice((2, 3, 4))
    calls = [draw_call(pick, 10 * seed + i) for i in range(pick.choice((1, 2, 3)))]
    calls += calls[: pick.choice((0, 1, 2))]  # repeats known signatures
    deviation = pick.choice(DEVIATIONS)
    odd, at = pick.randrange(world), pick.randrange(len(calls))
    programs = [list(calls) for _ in range(world)]
    if deviation == "order":
        other = pick.randrange(len(calls))
        program = programs[odd]
        program[at], program[other] = program[other], program[at]
    else:
        programs[odd][at] = deviate(calls[at], deviation, pick)
    return Case(
        seed, world, tuple(tuple(program) for program in programs), pick.random() < 0.5, deviation
    )


# --- The correct results in float64, from the operands of all ranks -------------------------------


def results_of_all(calls: list[CallSpec], operands: list[list[Tensor]]) -> list[Tensor]:
    """The results of a legal call on all ranks."""
    call, world = calls[0], len(calls)
    first = [tensors[0] for tensors in operands]
    if call.op == "all_gather":
        return [torch.cat(first, call.dim)] * world
    if call.op == "all_reduce":
        stacked = torch.stack(first)
        return [stacked.sum(0) if call.reduce_op == "sum" else stacked.amax(0)] * world
    if call.op == "reduce_scatter":
        return shares(torch.stack(first).sum(0), call.dim, world)
    return ranks.MATMULS[call.op].results(first, [tensors[1] for tensors in operands], call.dim)


def shares(whole: Tensor, dim: int, world: int) -> list[Tensor]:
    length = whole.shape[dim] // world
    return [whole.narrow(dim, rank * length, length) for rank in range(world)]


def cotangent(call: CallSpec, like: Tensor, rank: int) -> Tensor:
    """The cotangent of this rank's result; for matmul_all_reduce, the same on all ranks."""
    seed = 0 if call.op == "matmul_all_reduce" else 1000 * call.seed + rank
    generator = torch.Generator().manual_seed(7 + seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(call.dtype)


def expected(calls: list[CallSpec], rank: int, *, backward: bool) -> tuple[Tensor, list[Tensor]]:
    """This rank's result, and the gradients of the operands that require one."""
    world = len(calls)
    operands = [[t.double() for t in c.operands(r, world)] for r, c in enumerate(calls)]
    needs = [needed for needed, _ in zip(calls[rank].gradients, operands[rank], strict=False)]
    for tensors in operands:
        for tensor in tensors:
            tensor.requires_grad_()
    results = results_of_all(calls, operands)
    if not (backward and any(needs)):
        return results[rank].detach(), []
    once = calls[0].op == "matmul_all_reduce"
    loss = torch.stack([
        (result * cotangent(call, result, r).double()).sum()
        for r, (call, result) in enumerate(zip(calls, results, strict=True))
        if r == 0 or not once
    ]).sum()  # fmt: skip
    wanted = [t for t, needed in zip(operands[rank], needs, strict=False) if needed]
    return results[rank].detach(), list(torch.autograd.grad(loss, wanted))
