"""Products by kernels on a GPU: each is correct, and the chosen, recorded one runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axonn_ext.kernels import extension, tuning
from axonn_ext.spec import settings
from axonn_ext.verify import products
from axonn_ext.verify.products import HALF, laid_out, operands
from grids import bound, relative_error
from product_cases import CPU_VARIANTS
from tuning_cache import cache_in, edit, files

pytestmark = pytest.mark.gpu


@contextmanager
def all_kernels(directory: Path | str = "") -> Iterator[None]:
    with cache_in(directory, product_kernels=settings.PRODUCT_KERNELS):
        yield


def names_of(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
    kinds = filter(products.is_registered, settings.PRODUCT_KERNELS)  # triton need not be installed
    return [name for kind in kinds for name in products.names_of(kind, a, b, bias)]


@pytest.mark.parametrize("layout", products.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", products.SHAPES)
@pytest.mark.parametrize("kind", settings.PRODUCT_KERNELS)
def test_every_kernel_is_right(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, layout: str
):
    if not products.is_registered(kind):
        pytest.skip(f"{kind} is not built or not installed")
    with all_kernels():
        count, failures = products.product_failures(kind, shape, dtype, layout)
    assert not failures, "\n".join(failures)
    assert count > 0 or kind != "cublaslt"


@pytest.mark.timing
@pytest.mark.parametrize("dtype", HALF)
def test_all_are_measured_and_none_is_found_wrong(
    dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    a, b, bias = operands((512, 768, 1024), "NT", dtype)
    state = torch.cuda.get_rng_state()
    with all_kernels(tmp_path):
        choice = tuning.tune_product(a, b, bias=bias, product_pass="forward")
        expected = (*CPU_VARIANTS, *names_of(a, b, bias))
    assert choice is not None and set(choice.median_us) == set(expected)
    assert "does not use" not in capfd.readouterr().err
    assert " cublaslt=" in choice.signature
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.timing
def test_what_is_on_disk_is_what_runs(tmp_path: Path):
    a, b, _ = operands((512, 768, 1024), "NT", torch.bfloat16)
    for name in ("cublaslt", "triton"):
        with all_kernels(tmp_path / name):
            first = tuning.tune_product(a, b, product_pass="dgrad")
            assert first is not None
            offered = [kernel for kernel in first.median_us if kernel.startswith(f"{name}_")]
            if not offered:  # triton need not be installed
                continue
            [file] = files(tmp_path / name)
            edit(file, offered[-1])
            tuning.clear()
            kept = tuning.tune_product(a, b, product_pass="dgrad")
            assert kept is not None
            assert (kept.algorithm, kept.source) == (offered[-1], "disk")


@pytest.mark.timing
def test_kernels_left_out_by_the_settings_are_another_record(tmp_path: Path):
    a, b, _ = operands((512, 768, 1024), "NN", torch.bfloat16)
    signatures = []
    for kinds in ((), ("cublaslt",)):
        with cache_in(tmp_path):
            extension.configure(
                dataclasses.replace(settings.load(), cache_dir=str(tmp_path), product_kernels=kinds)
            )
            choice = tuning.tune_product(a, b, product_pass="wgrad")
            assert choice is not None and choice.source == "measured"
            signatures.append(choice.signature)
    assert signatures[1].startswith(f"{signatures[0]} cublaslt=")


def test_other_rows_of_memory_have_the_same_algorithms():
    """A name also finds the kernel for operands with gaps between rows, or at another address."""
    whole = laid_out(1024, 1024, "N", torch.bfloat16, "cuda")
    a, b, _ = operands((512, 512, 512), "NN", torch.bfloat16)
    exact_of = {False: a.double() @ b.double(), True: whole[:512, 256:768].double() @ b.double()}
    with all_kernels():
        for name in names_of(a, b, None):
            for strided, x in ((False, a), (True, whole[:512, 256:768])):
                try:
                    got = torch.ops.axonn._tuned_mm(x, b, None, name)
                except NotImplementedError:
                    assert strided, name  # not available for these; Linears use torch's
                    continue
                error = relative_error(got, exact_of[strided])
                assert error <= bound(torch.bfloat16, 512), name


@pytest.mark.parametrize("dtype", HALF)
def test_every_kernel_can_be_captured(dtype: torch.dtype):
    a, b, bias = operands((256, 512, 1024), "NT", dtype)
    with all_kernels():
        for name in names_of(a, b, bias):
            want = torch.ops.axonn._tuned_mm(a, b, bias, name)  # compiles and loads
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = torch.ops.axonn._tuned_mm(a, b, bias, name)
            got.zero_()
            graph.replay()
            assert torch.equal(got, want), name


@pytest.mark.timing
def test_tf32_is_measured_apart():
    a, b, _ = operands((256, 256, 256), "NN", torch.float32)
    before = torch.backends.cuda.matmul.fp32_precision
    signatures = []
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            with all_kernels():
                choice = tuning.tune_product(a, b, product_pass="forward")
            assert choice is not None
            signatures.append(choice.signature)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert " tf32=0 " in signatures[0] and " tf32=1 " in signatures[1]
