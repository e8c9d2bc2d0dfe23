"""Checks our Triton matmul, in the interpreter and on GPUs.

It imports triton, so import it only after choosing how kernels run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.kernels.triton.launch import checked_config, limits_of
from axonn_ext.kernels.triton.matmul import launch, problem_of
from axonn_ext.kernels.triton.tile_configs import TileConfig
from grids import relative_error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MatmulCase:
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "NN"  # as in tile_configs.Problem
    bias: bool = False


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The same matrix, with contiguous rows (N) or columns (T), or neither (S)."""
    if layout == "N":
        return matrix.contiguous()
    if layout == "T":
        return matrix.t().contiguous().t()
    rows, columns = matrix.shape
    wide = matrix.new_full((2 * rows, 2 * columns), float("nan"))
    wide[::2, ::2] = matrix
    return wide[::2, ::2]


def product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """a @ b + bias with this config; None: the one that the cost model ranks first."""
    problem = problem_of(a, b, bias)
    config = checked_config("product", config, problem, limits_of(a.device))
    with torch.cuda.device_of(a):
        return launch(a, b, bias, problem=problem, config=config)


def limit_of(torch_error: float, dtype: torch.dtype) -> float:
    """Twice torch's error, plus a rounding to the dtype, half a unit in the last place.

    Torch may happen to be exact, e.g. for sums of few terms, so fp32 roundings are added.
    """
    return 2 * torch_error + torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps


def check_matmul(
    cases: Sequence[MatmulCase], configs: Sequence[TileConfig | None], device: str
) -> list[str]:
    """Checks every case with every config against float64 and torch; returns the failures."""
    failures = []
    for case, config in itertools.product(cases, configs):
        dtype = DTYPES[case.dtype]
        a = draw(case.m, case.k, dtype=dtype, device=device, seed=1)
        b = draw(case.k, case.n, dtype=dtype, device=device, seed=2) / max(case.k, 1) ** 0.5
        bias = draw(case.n, dtype=dtype, device=device, seed=3) if case.bias else None
        added = bias if bias is not None else torch.zeros(case.n, dtype=dtype, device=device)
        want = a.double() @ b.double() + added.double()
        torch_error = relative_error(a @ b + added, want)
        x, w = laid_out(a, case.layout[0]), laid_out(b, case.layout[1])
        got = product(x, w, bias, config)
        error = relative_error(got, want)
        limit = limit_of(torch_error, dtype)
        if got.dtype != dtype or not got.is_contiguous() or not error <= limit:
            name = config.name if config else "default"
            failures.append(f"{case} {name}: {got.dtype} {error:.2e} > {limit:.2e}")
    return failures
