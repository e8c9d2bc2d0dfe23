"""Offers the Triton kernels to the ops of csrc, which find them through the dispatcher.

Importing this does not import triton: the first call on a GPU that needs one of the kernels does.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor
from torch.library import Library

from axonn_ext.kernels import (
    extension,  # noqa: F401  the schemas
    host,
)


def register_products(library: Library, dispatch_key: str) -> None:
    """Gives the ops of a Linear's products (csrc/ops/tuning/product.h) their Triton matmul.

    The kernels stay registered for the dispatch key while `library` lives.
    """

    def candidates(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
        from axonn_ext.kernels.triton import products

        return products.offered_configs(a, b, bias)

    def product(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
        from axonn_ext.kernels.triton import products

        return products.product(a, b, bias, name)

    library.impl("_mm_triton_candidates", candidates, dispatch_key)
    library.impl("_mm_triton", product, dispatch_key)


def register_fused(library: Library, dispatch_key: str) -> None:
    """Gives the fused ops (csrc/ops/cuda/triton_gemm.h) their Triton kernels, in the same way."""

    def gather(
        a: Tensor, b: Tensor, d: Tensor, arriving: str, rank: int, num_ranks: int, chunks: int,
        chunk_tile: int, pad: int, epoch: int, failure: int, timeout: int, max_programs: int,
    ) -> None:  # fmt: skip
        from axonn_ext.kernels.triton import fused

        arrivals = fused.Arrivals(rank, num_ranks, chunks, chunk_tile, pad, epoch, failure, timeout)
        fused.gather(a, b, d, arriving, arrivals, max_programs=max_programs)

    def scatter(
        a: Tensor, b: Tensor, rank: int, chunks: int, slots: list[int], pads: list[int],
        counters: int, epoch: int, max_programs: int,
    ) -> None:  # fmt: skip
        from axonn_ext.kernels.triton import fused

        departures = fused.Departures(rank, chunks, slots, pads, counters, epoch)
        fused.scatter(a, b, departures, max_programs=max_programs)

    library.impl("_fused_gather_triton", gather, dispatch_key)
    library.impl("_fused_scatter_triton", scatter, dispatch_key)


LIBRARY = Library("axonn", "IMPL")
if importlib.util.find_spec("triton") is not None:
    if host.gpu_runtime():
        register_products(LIBRARY, "CUDA")
    if host.runs_cuda():
        register_fused(LIBRARY, "CUDA")
