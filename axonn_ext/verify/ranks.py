"""Checks the four matmul ops between real ranks against a float64 reference of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import ops
from axonn_ext.verify.accuracy import relative_error

# The ops, each with the dimension that is gathered or scattered.
OPS = (
    ("all_gather_matmul", 0),
    ("all_gather_matmul", 1),
    ("matmul_all_gather_rhs", 0),
    ("matmul_all_gather_rhs", 1),
    ("matmul_reduce_scatter", 0),
    ("matmul_reduce_scatter", 1),
    ("matmul_all_reduce", 0),
)
LAYOUTS = {"NN": (False, False), "NT": (False, True), "TN": (True, False)}


def draw(*shape: int, dtype: torch.dtype, rank: int, requires_grad: bool = True) -> Tensor:
    """Returns the tensor of a rank. Any rank can draw it, so each can compute the reference."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    # The values fit into bf16, so that every dtype starts from the same numbers.
    values = torch.randn(shape, generator=generator).bfloat16().to(dtype)
    return values.requires_grad_(requires_grad)


class Case:
    """One op on this rank, and its float64 reference, which computes the results of all ranks."""

    def __init__(self, op: str, dim: int, m: int, k: int, n: int) -> None:
        self.op, self.dim = op, dim
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        w = self.size
        if op == "all_gather_matmul":
            self.a, self.b = (m, k), (k * (w if dim == 1 else 1), n)
        elif op == "matmul_all_gather_rhs":
            self.a, self.b = (m, k * (w if dim == 0 else 1)), (k, n)
        else:  # the number of ranks must divide the product's scattered dimension
            self.a, self.b = (m * w, k), (k, n * w)

    def run(self, function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        world = dist.group.WORLD
        if self.op == "matmul_all_reduce":
            return function(a, b, world)
        key = "scatter_dim" if self.op == "matmul_reduce_scatter" else "gather_dim"
        return function(a, b, world, **{key: self.dim})

    def reference(self, leaves: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Returns every rank's result, from every rank's operands."""
        a, b = [leaf[0] for leaf in leaves], [leaf[1] for leaf in leaves]
        if self.op == "all_gather_matmul":
            return [torch.cat(a, self.dim) @ mine for mine in b]
        if self.op == "matmul_all_gather_rhs":
            return [mine @ torch.cat(b, self.dim) for mine in a]
        total = torch.stack([x @ y for x, y in zip(a, b, strict=True)]).sum(0)
        if self.op == "matmul_all_reduce":
            return [total] * self.size
        return list(total.chunk(self.size, self.dim))


def limit_of(dtype: torch.dtype, terms: int, size: int) -> float:
    """Returns `accuracy.bound`, plus a rounding to the dtype for each rank's part of a sum.

    NCCL accumulates in the tensors' own dtype.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    limit = 4 * torch.finfo(wide).eps * math.sqrt(max(terms, 1))
    return limit + (0 if dtype == wide else 2 * torch.finfo(dtype).eps * math.sqrt(size + 1))


def _on_gpu(t: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    t = t.detach().to("cuda", dtype)
    return (t.t().contiguous().t() if transposed else t).requires_grad_()


def op_failures(
    op: str,
    dim: int,
    algorithm: str,
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    """Returns wrong values and gradients on GPUs, and bits that differ from call to call.

    shapes  M, K, N of one rank, which `Case` rounds or multiplies as the op needs
    """
    failures = []
    rank, size = dist.get_rank(), dist.get_world_size()

    def function(*args: Tensor, **options: int) -> Tensor:
        return getattr(ops, op)(*args, algorithm=algorithm, **options)

    for m, k, n in shapes:
        case = Case(op, dim, m, k, n)
        leaves = [
            tuple(
                draw(*s, dtype=torch.float64, rank=r).detach().cuda().requires_grad_()
                for s in (case.a, case.b)
            )
            for r in range(size)
        ]
        want = case.reference(leaves)
        dys = [
            draw(*w.shape, dtype=torch.float64, rank=100 + r).detach().cuda()
            for r, w in enumerate(want)
        ]
        if op == "matmul_all_reduce":  # the result is one tensor on all ranks, with one gradient
            dys = [dys[0]] + [torch.zeros_like(d) for d in dys[1:]]
        torch.autograd.backward(want, dys)
        own_dy = dys[0 if op == "matmul_all_reduce" else rank]
        for dtype in dtypes:
            for layout, transposed in LAYOUTS.items():
                a, b = (
                    _on_gpu(t, dtype, by_columns)
                    for t, by_columns in zip(leaves[rank], transposed, strict=True)
                )
                y = case.run(function, a, b)
                y.backward(own_dy.to(dtype))
                limit = limit_of(dtype, max(m, k, n) * size, size)
                name = f"{op} {dim=} {(m, k, n)} {dtype} {layout}"
                results = [
                    ("y", y, want[rank]),
                    ("da", a.grad, leaves[rank][0].grad),
                    ("db", b.grad, leaves[rank][1].grad),
                ]
                if op == "matmul_all_reduce":
                    any_order = case.run(partial(function, deterministic=False), a, b)
                    results.append(("y in any order", any_order, want[rank]))
                for output, got, expected in results:
                    assert got is not None and expected is not None
                    error = relative_error(got.cpu(), expected.cpu())
                    if not error <= limit:
                        failures.append(f"{name} {output}: {error:.1e} > {limit:.1e}")
                if algorithm == "fused" and not torch.equal(case.run(function, a, b), y):
                    failures.append(f"{name}: not the same bits")
    return failures
