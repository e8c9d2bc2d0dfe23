"""Checks the kernels that Linears may choose for a product, under each of their names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axonn_ext import ops  # noqa: F401  registers torch.ops.axonn
from axonn_ext.verify.accuracy import bound, relative_error

HALF = (torch.bfloat16, torch.float16)
# The sizes are: one that every kernel supports, one that no tile divides, few rows, a large K.
SHAPES = ((256, 384, 128), (257, 129, 264), (8, 4096, 512), (128, 128, 8192))
LAYOUTS = ("NN", "NT", "TN")


def laid_out(rows: int, columns: int, layout: str, dtype: torch.dtype, device: str) -> Tensor:
    """Returns a random matrix.

    N: rows are contiguous. T: columns are contiguous. S: there are gaps in both directions.
    """
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device, dtype)
    if layout == "T":
        return values.t().contiguous().t()
    if layout == "S":
        return torch.stack([values, values], dim=-1)[..., 0]
    return values


def operands(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A, B and a bias."""
    m, n, k = shape
    a = laid_out(m, k, layout[0], dtype, device)
    b = laid_out(k, n, layout[1], dtype, device)
    return a, b, laid_out(1, n, "N", dtype, device)[0]


def is_registered(kind: str, device: str = "CUDA") -> bool:
    """Whether a kernel of that kind is registered for tensors of that dispatch key."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(f"axonn::_mm_{kind}", device))


def names_of(kind: str, a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
    """Returns the names of the kind's algorithms or configs for these operands."""
    _, *found = getattr(torch.ops.axonn, f"_mm_{kind}_candidates")(a, b, bias) or [""]
    return [f"{kind}_{name}" if name else kind for name in found]


def product_failures(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, layout: str, device: str = "cuda"
) -> tuple[int, list[str]]:
    """Returns the number of names, with and without a bias, and the failures.

    Kernels of this kind must be enabled in this process.
    """
    a, b, bias = operands(shape, layout, dtype, device)
    failures: list[str] = []
    count = 0
    for addend in (None, bias):
        exact = a.double() @ b.double() + (0 if addend is None else addend.double())
        library = relative_error(a @ b if addend is None else a @ b + addend, exact)
        limit = 2 * library + bound(dtype, shape[2])
        names = names_of(kind, a, b, addend)
        count += len(names)
        for name in names:
            got = torch.ops.axonn._tuned_mm(a, b, addend, name)
            what = f"{name} {shape} {dtype} {layout}{'' if addend is None else ' bias'}"
            if not got.is_contiguous() or got.dtype != dtype:
                failures.append(f"{what}: the result has {got.dtype} and strides {got.stride()}")
            error = relative_error(got, exact)
            if not error <= limit:
                failures.append(f"{what}: {error:.1e} > {limit:.1e}")
            if not torch.equal(got, torch.ops.axonn._tuned_mm(a, b, addend, name)):
                failures.append(f"{what}: not the same bits")
    return count, failures


def all_failures(
    kind: str,
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[str],
) -> tuple[int, list[str]]:
    """Returns the same for all shapes, dtypes and layouts."""
    results = [
        product_failures(kind, shape, dtype, layout)
        for dtype in dtypes
        for layout in layouts
        for shape in shapes
    ]
    return sum(count for count, _ in results), [text for _, found in results for text in found]
