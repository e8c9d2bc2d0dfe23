"""The benchmark of nn.Linear, forward and backward.

Legend: M rows, N out features, K in features, all global; (r, s) = (x, y) for the role
"expand" and (y, x) for "contract"; m = M / Gz, n = N / Gr, k = K / Gs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from axonn_ext import nn
from axonn_ext.bench.case import Case, Collective, Spec, bind_all, call_all
from axonn_ext.bench.reference import Expected, Outputs, Whole, expected_product, round_off
from axonn_ext.calibrate.shapes import GemmShape
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.ranks.grid import AxisGroup, Dims, Grid


def linear_case(spec: Spec, grid: Grid) -> Case:
    """Returns the case of nn.Linear without bias: y, and the gradients of x and of the weight."""
    shape, dtype = spec.shape, DTYPES[spec.dtype]
    assert isinstance(shape, GemmShape)
    role, layout = spec.options["role"], spec.options["layout"]
    linears = {
        name: nn.Linear(
            shape.K, shape.N, grid=grid, role=role, layout=layout, bias=False, algorithm=name,
            seed=None, dtype=dtype, device=spec.device,
        )
        for name in spec.algorithms
    }  # fmt: skip
    probe = next(iter(linears.values()))  # the Linears differ only in their algorithm
    x = Whole("x", shape.M, shape.K, dtype, spec.device)
    dy = Whole("dy", shape.M, shape.N, dtype, spec.device)
    weight = Whole("weight", shape.N, shape.K, dtype, spec.device)
    places = {
        "x": _block_of(grid, x, probe.input_dims),
        "y": _block_of(grid, dy, probe.output_dims),
        "weight": _block_of(grid, weight, probe.specs["weight"].dims),
    }
    local_weight = weight.block(*places["weight"])
    for linear in linears.values():
        with torch.no_grad():
            linear.weight.copy_(local_weight)
    local_x = x.block(*places["x"]).requires_grad_()
    local_dy = dy.block(*places["y"])

    def run(linear: nn.Linear, weight: Tensor) -> Outputs:
        local_x.grad = weight.grad = None
        y = linear(local_x)
        y.backward(local_dy)
        assert local_x.grad is not None and weight.grad is not None
        return {"y": y, "dx": local_x.grad, "dweight": weight.grad}

    sizes = LinearSizes.of(grid, shape, role=role, layout=layout, device=spec.device)
    return Case(
        spec,
        partial(call_all, sizes.matmuls(dtype)),
        bind_all(sizes.collectives(dtype)),
        {name: partial(run, linear, linear.weight) for name, linear in linears.items()},
        _expected_of_linear(x, dy, weight, places, num_ranks=grid.world_size),
    )


def _expected_of_linear(
    x: Whole, dy: Whole, weight: Whole, places: Mapping[str, tuple[range, range]], num_ranks: int
) -> dict[str, Expected]:
    """Returns this rank's blocks of y = x W^T, dx = dy W and dW = dy^T x."""

    def expect(
        place: str, terms: int, left: Callable[[Sequence[int]], Tensor],
        right: Callable[[Sequence[int]], Tensor],
    ) -> Expected:  # fmt: skip
        rows, columns = places[place]
        limit = round_off(x.dtype, terms, num_ranks)
        return expected_product(
            left, right, rows=rows, columns=columns, terms=terms, limit=limit
        )  # fmt: skip

    return {
        "y": expect("y", x.num_columns, lambda rows: x.take(rows, x.columns),
                    lambda columns: weight.take(columns, weight.columns).t()),
        "dx": expect("x", dy.num_columns, lambda rows: dy.take(rows, dy.columns),
                     lambda columns: weight.take(weight.rows, columns)),
        "dweight": expect("weight", x.num_rows, lambda rows: dy.take(dy.rows, rows).t(),
                          lambda columns: x.take(x.rows, columns)),
    }  # fmt: skip


@dataclass(frozen=True)
class LinearSizes:
    """The sizes of one rank's matmuls and messages for a Linear, forward and backward."""

    m: int
    n: int
    k: int
    r: AxisGroup
    s: AxisGroup
    z: AxisGroup
    sharded: bool
    device: str

    @classmethod
    def of(
        cls, grid: Grid, shape: GemmShape, *, role: str, layout: str, device: str = "cpu"
    ) -> LinearSizes:
        r, s = (grid.axis(axis) for axis in (("x", "y") if role == "expand" else ("y", "x")))
        z = grid.axis("z")
        m, n, k = shape.M // z.size, shape.N // r.size, shape.K // s.size
        return cls(m, n, k, r, s, z, layout == "sharded", device)

    def matmuls(self, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
        """Returns the matmuls of forward, dgrad and wgrad, with gathered operands."""
        generator = torch.Generator().manual_seed(0)
        x, w, dy = (
            torch.randn(sizes, generator=generator).to(self.device, dtype)
            for sizes in ((self.m, self.k), (self.n, self.k), (self.m, self.n))
        )
        return [
            partial(torch.mm, x, w.t()),
            partial(torch.mm, dy, w),
            partial(torch.mm, dy.t(), x),
        ]

    def collectives(self, dtype: torch.dtype) -> list[Collective]:
        """Returns the collectives that "sequential" issues, in its order."""
        m, n, k, r, s, z = self.m, self.n, self.k, self.r, self.s, self.z
        gather_weight = Collective("all_gather", z, (n // z.size, k), dtype, self.device)
        reduce_dweight = Collective("reduce_scatter", z, (n, k), dtype, self.device)
        if not self.sharded:
            return [
                gather_weight, Collective("all_reduce", s, (m, n), dtype, self.device),
                gather_weight, Collective("all_reduce", r, (m, k), dtype, self.device),
                reduce_dweight,
            ]  # fmt: skip
        gather_x = Collective("all_gather", r, (m // r.size, k), dtype, self.device)
        return [
            gather_weight, gather_x, Collective("reduce_scatter", s, (m, n), dtype, self.device),
            Collective("all_gather", s, (m // s.size, n), dtype, self.device), gather_weight,
            Collective("reduce_scatter", r, (m, k), dtype, self.device), gather_x, reduce_dweight,
        ]  # fmt: skip


def _block_of(grid: Grid, whole: Whole, dims: Dims) -> tuple[range, range]:
    """Returns the rows and columns of this rank's block."""
    offsets, sizes = grid.local_block((whole.num_rows, whole.num_columns), dims)
    rows, columns = (range(o, o + size) for o, size in zip(offsets, sizes, strict=True))
    return rows, columns
