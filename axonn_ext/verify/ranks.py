"""Checks the matmul ops between real ranks against a float64 reference of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import ops
from axonn_ext.verify.accuracy import relative_error

Shape = tuple[int, int]


@dataclass(frozen=True)
class Matmul:
    """What an op computes, without using the op. M, K and N are sizes of the whole product.

    option   the argument that gives the dimension, if there is one
    divided  the one of M, K and N that is split over the ranks, by dimension
    shapes   a rank's a and b, from M, K, N, the dimension and the number of ranks
    results  every rank's result, from every rank's a and b and the dimension
    is_one   whether the result is one tensor that every rank holds, so that it has one gradient
    """

    option: str | None
    divided: str
    shapes: Callable[[int, int, int, int, int], tuple[Shape, Shape]]
    results: Callable[[Sequence[Tensor], Sequence[Tensor], int], list[Tensor]]
    is_one: bool = False


def _total(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)]).sum(0)


MATMULS: Mapping[str, Matmul] = {
    "all_gather_matmul": Matmul(
        "gather_dim", "MK",
        lambda m, k, n, dim, w: ((m, k // w) if dim else (m // w, k), (k, n)),
        lambda a, b, dim: [torch.cat([*a], dim) @ mine for mine in b],
    ),
    "matmul_all_gather_rhs": Matmul(
        "gather_dim", "KN",
        lambda m, k, n, dim, w: ((m, k), (k, n // w) if dim else (k // w, n)),
        lambda a, b, dim: [mine @ torch.cat([*b], dim) for mine in a],
    ),
    "matmul_reduce_scatter": Matmul(
        "scatter_dim", "MN",
        lambda m, k, n, dim, w: ((m, k), (k, n)),
        lambda a, b, dim: list(_total(a, b).chunk(len(a), dim)),
    ),
    "matmul_all_reduce": Matmul(
        None, "",
        lambda m, k, n, dim, w: ((m, k), (k, n)),
        lambda a, b, dim: [_total(a, b)] * len(a),
        is_one=True,
    ),
}  # fmt: skip
# Each op with the dimensions that it can gather or scatter.
OPS = tuple((op, dim) for op, what in MATMULS.items() for dim in range(len(what.divided) or 1))
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
        self.op, self.dim, self.what = op, dim, MATMULS[op]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        gathers = self.what.option == "gather_dim"
        multiples = self.what.divided[dim] if gathers else "MN"  # ranks may split a sum either way
        m, k, n = (
            size * (self.size if letter in multiples else 1)
            for letter, size in zip("MKN", (m, k, n), strict=True)
        )
        self.a, self.b = self.what.shapes(m, k, n, dim, self.size)

    def run(self, function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        options = {} if self.what.option is None else {self.what.option: self.dim}
        return function(a, b, dist.group.WORLD, **options)

    def reference(self, leaves: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Returns every rank's result, from every rank's operands."""
        a, b = zip(*leaves, strict=True)
        return self.what.results(a, b, self.dim)


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
    """Returns wrong values and gradients on GPUs, and bits that differ between calls.

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
        if case.what.is_one:
            dys = [dys[0]] + [torch.zeros_like(d) for d in dys[1:]]
        torch.autograd.backward(want, dys)
        own_dy = dys[0 if case.what.is_one else rank]
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
