"""The benchmark of a matmul with one collective over x, forward only.

Legend: W ranks along x; M, N, K global sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from axonn_ext import ops
from axonn_ext.bench import symm_mem
from axonn_ext.bench.case import Case, Collective, Spec, bind_all
from axonn_ext.bench.reference import Outputs, Whole, expected_product, round_off
from axonn_ext.calibrate.shapes import GemmShape
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.ranks.grid import AxisGroup, Grid


def gemm_case(spec: Spec, grid: Grid) -> Case:
    """Returns the case of all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce over x.

    ag-gemm   A [M / W, K]   B [K, N / W]   result [M, N / W]
    gemm-rs   A [M, K / W]   B [K / W, N]   result [M / W, N]
    gemm-ar   A [M, K / W]   B [K / W, N]   result [M, N]
    """
    shape, axis, dtype = spec.shape, grid.axis("x"), DTYPES[spec.dtype]
    assert isinstance(shape, GemmShape)
    a = Whole("a", shape.M, shape.K, dtype, spec.device)
    b = Whole("b", shape.K, shape.N, dtype, spec.device)
    if spec.op == "ag-gemm":
        op: Callable[..., Tensor] = ops.all_gather_matmul
        rows, columns = a.rows, _part("N", shape.N, axis)
        local_a, local_b = a.block(_part("M", shape.M, axis), a.columns), b.block(b.rows, columns)
        floor = partial(torch.mm, a.block(a.rows, a.columns), local_b)
        collective = Collective("all_gather", axis, tuple(local_a.shape), dtype, spec.device)
    else:
        rows, columns = a.rows, b.columns
        inner = _part("K", shape.K, axis)
        local_a, local_b = a.block(a.rows, inner), b.block(inner, b.columns)
        floor = partial(torch.mm, local_a, local_b)
        kind = "reduce_scatter" if spec.op == "gemm-rs" else "all_reduce"
        collective = Collective(kind, axis, (shape.M, shape.N), dtype, spec.device)
        op = ops.matmul_reduce_scatter if spec.op == "gemm-rs" else ops.matmul_all_reduce
        if spec.op == "gemm-rs":
            rows = _part("M", shape.M, axis)
    expected = expected_product(
        lambda chosen: a.take(chosen, a.columns),
        lambda chosen: b.take(b.rows, chosen),
        rows=rows, columns=columns, terms=shape.K, limit=round_off(dtype, shape.K, axis.size),
    )  # fmt: skip

    def run(algorithm: str) -> Outputs:
        return {"y": op(local_a, local_b, axis.process_group, algorithm=algorithm)}

    algorithms: dict[str, Callable[[], Outputs]] = {
        name: partial(run, name) for name in spec.algorithms if name != symm_mem.NAME
    }
    if symm_mem.NAME in spec.algorithms:
        symm_mem.require_peer_access(axis.size)
        baseline = symm_mem.bind_symm_mem(spec.op, local_a, local_b, axis)
        algorithms[symm_mem.NAME] = lambda: {"y": baseline()}
    return Case(spec, floor, bind_all([collective]), algorithms, {"y": expected})


def _part(name: str, size: int, axis: AxisGroup) -> range:
    """Returns this rank's part of a dimension that the axis splits."""
    length, rest = divmod(size, axis.size)
    if rest:
        raise ValueError(f"{name}={size} must be divisible by {axis.size} ({axis.axis})")
    return range(axis.rank * length, (axis.rank + 1) * length)
