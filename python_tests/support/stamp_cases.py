"""Made-up stamps of `axonn-ext verify`, and the products that tuning may measure with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.library import Library

from axonn_ext.kernels import extension, tuning, verified
from axonn_ext.kernels.verified import Key, Stamp, Verdict
from axonn_ext.spec import settings
from tuning_cache import cache_in

H100 = Key(
    "NVIDIA H100 80GB HBM3", "580.65.06", "2.13.0+cu130", "2.29.7", "3.9.0", "0.1.0+12345678"
)
RIGHT = {
    "fused": Verdict(ranks=4),
    **{name: Verdict() for name in ("cublaslt", "triton", "fused_sm90")},
}
WRONG = Verdict(reasons={"fused: sums, virtual ranks": "rank 0 was killed by SIGABRT"})


@contextmanager
def fake_fused_sm90() -> Iterator[None]:
    """Registers a product kernel named fused_sm90 on the CPU."""
    library = Library("axonn", "IMPL")

    def candidates(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
        return ["1", ""]

    def product(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
        y = a @ b
        return [y if bias is None else y + bias]

    library.impl("_mm_fused_sm90_candidates", candidates, "CPU")
    library.impl("_mm_fused_sm90", product, "CPU")
    try:
        yield
    finally:
        library._destroy()


def measured_products(
    monkeypatch: pytest.MonkeyPatch, stamp: Stamp | None, **changes: tuple[str, ...]
) -> set[str]:
    """The variants of a product that tuning measures, with the fake kernel and this stamp."""
    unlocked = verified.unlocked(changes.get("product_kernels"), [stamp])
    monkeypatch.setattr(extension, "find_unlocked", lambda loaded: unlocked)
    with fake_fused_sm90(), cache_in("", **changes):
        choice = tuning.tune_product(
            torch.ones(256, 256), torch.ones(256, 256), product_pass="dgrad"
        )
    monkeypatch.undo()
    extension.configure(settings.load())
    assert choice is not None
    return set(choice.median_us)
