"""Offers the Triton matmul to the ops as one way to compute a product of a Linear.

Importing this imports no triton: the first product on a GPU that is to be tuned does.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor
from torch.library import Library

from axonn_ext import _library, _machine  # noqa: F401  the schemas


def register_triton(library: Library, dispatch_key: str) -> None:
    """Gives the ops of csrc/ops/schema.cpp their kernels for a device, while `library` lives."""

    def candidates(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
        from axonn_ext.triton import products

        return products.offered_configs(a, b, bias)

    def product(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
        from axonn_ext.triton import products

        return products.product(a, b, bias, name)

    library.impl("_mm_triton_candidates", candidates, dispatch_key)
    library.impl("_mm_triton", product, dispatch_key)


LIBRARY = Library("axonn", "IMPL")
if _machine.gpu_runtime() and importlib.util.find_spec("triton") is not None:
    register_triton(LIBRARY, "CUDA")
