"""Kernels as ways to compute a product: offered where they exist, used only if they are correct.

What stands for a faulty kernel is registered as a kernel is, on the CPU; and so is the Triton
matmul, in its interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from axonn_ext import nn
from axonn_ext.kernels import extension, tuning
from axonn_ext.kernels.triton import register
from axonn_ext.spec import settings
from axonn_ext.verify.products import laid_out
from grids import bound, relative_error
from product_cases import CPU_VARIANTS, K, M, N, linear_and_input
from tuning_cache import cache_in, edit, files

Kernel = Callable[[Tensor, Tensor], Tensor]


def exact(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def off_by_a_tile(a: Tensor, b: Tensor) -> Tensor:
    y = exact(a, b)
    y[-8:, -8:] += a[-8:, :16] @ b[:16, -8:]
    return y


def one_nan(a: Tensor, b: Tensor) -> Tensor:
    y = exact(a, b)
    y[3, 5] = float("nan")
    return y


def fails(a: Tensor, b: Tensor) -> Tensor:
    raise RuntimeError("no such luck")


TURNS = itertools.count()


def never_the_same(a: Tensor, b: Tensor) -> Tensor:
    """Every other time a little more, within what rounding may do.

    It leaves no right result in memory that is free then, where `unwritten` could find it.
    """
    return exact(a, b).mul_(1 + 1e-6 * (next(TURNS) % 2))


def unwritten(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.size(0), b.size(1))


FAULTS: dict[str, tuple[Kernel, str]] = {
    "off_by_a_tile": (off_by_a_tile, "its result differs by"),
    "one_nan": (one_nan, "its result differs by"),
    "fails": (fails, "no such luck"),
    "never_the_same": (never_the_same, "not the same bits twice"),
    "unwritten": (unwritten, "its result differs by"),
    "of_another_shape": (lambda a, b: exact(a[:1], b), "another shape"),
}


@contextmanager
def kernels(**by_name: Kernel) -> Iterator[None]:
    """Products on the CPU may be computed by these, too, as long as it lasts."""
    library = Library("axonn", "IMPL")

    def candidates(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
        return ["7", *by_name]

    def product(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
        if name not in by_name:
            return []
        y = by_name[name](a, b)
        return [y if bias is None else y + bias]

    library.impl("_mm_triton_candidates", candidates, "CPU")
    library.impl("_mm_triton", product, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def unlisted() -> Iterator[None]:
    """A kernel on the CPU that fails to say what it offers, as long as it lasts."""
    library = Library("axonn", "IMPL")

    def candidates(a: Tensor, b: Tensor, bias: Tensor | None) -> list[str]:
        raise RuntimeError("the compiler is not there")

    library.impl("_mm_triton_candidates", candidates, "CPU")
    library.impl("_mm_triton", lambda a, b, bias, name: [], "CPU")
    try:
        yield
    finally:
        library._destroy()


def operands() -> tuple[Tensor, Tensor]:
    return torch.ones(M, K), torch.zeros(N, K).t()  # of which a wrong product is right, too


def tuned(directory: Path | str) -> tuning.Choice:
    a, b = operands()
    with cache_in(directory):
        choice = tuning.tune_product(a, b, product_pass="forward")
    assert choice is not None
    return choice


# --- What is offered ------------------------------------------------------------------------------


def test_no_kernel_is_offered_on_the_cpu(tmp_path: Path):
    choice = tuned(tmp_path)
    assert tuple(choice.median_us) == CPU_VARIANTS
    assert choice.signature.endswith(f"threads={torch.get_num_threads()}")
    a = torch.ones(4, 4)
    for name in ("cublaslt_66_20_36_1_0_0_3_0_5", "triton_m64n64k64w4s5g8p1", "fused_sm90"):
        with pytest.raises(NotImplementedError, match=f"'{name}' is not built or not used here"):
            torch.ops.axonn._tuned_mm(a, a, None, name)
    for name in ("cublaslt", "triton_", "triton_m64 n64", "fused_sm90_1"):
        with pytest.raises(ValueError, match=r"variant must be direct, .* or triton_<config>"):
            torch.ops.axonn._tuned_mm(a, a, None, name)


def test_a_kernel_is_one_more_way_with_its_version(tmp_path: Path):
    with kernels(good=exact):
        choice = tuned(tmp_path)
        assert tuple(choice.median_us) == (*CPU_VARIANTS, "triton_good")
        assert choice.signature.endswith(" triton=7")
        a, b = torch.randn(8, 4), torch.randn(4, 8)
        bias = torch.randn(8)
        got = torch.ops.axonn._tuned_mm(a, b, bias, "triton_good")
        assert torch.equal(got, exact(a, b) + bias)
        [file] = files(tmp_path)
        edit(file, "triton_good")
        kept = tuned(tmp_path)
        assert (kept.algorithm, kept.source) == ("triton_good", "disk")
    assert tuned(tmp_path).source == "measured"  # what was kept with kernels is another record


def test_kinds_that_the_settings_leave_out_are_not_used(tmp_path: Path):
    loaded = settings.load()
    with kernels(good=exact), cache_in(""):
        extension.configure(dataclasses.replace(loaded, product_kernels=("cublaslt",)))
        choice = tuning.tune_product(*operands(), product_pass="forward")
        assert choice is not None and tuple(choice.median_us) == CPU_VARIANTS
        with pytest.raises(NotImplementedError, match="not used here"):
            torch.ops.axonn._tuned_mm(torch.ones(4, 4), torch.ones(4, 4), None, "triton_good")
        with pytest.raises(ValueError, match="expected cublaslt, triton or fused_sm90, got 'all'"):
            extension.configure(dataclasses.replace(loaded, product_kernels=("all",)))


def test_a_kernel_that_cannot_say_what_it_offers_is_left_out(capfd: pytest.CaptureFixture[str]):
    with unlisted():
        choice = tuned("")
    assert tuple(choice.median_us) == CPU_VARIANTS and "triton" not in choice.signature
    assert (
        "axonn_ext measures no triton kernels for [256, 256] @ [256, 256] of Float: "
        "RuntimeError: the compiler is not there"
    ) in capfd.readouterr().err


# --- What is right --------------------------------------------------------------------------------


def test_kernels_that_err_are_out_and_warned_of(capfd: pytest.CaptureFixture[str]):
    with kernels(good=exact, **{name: kernel for name, (kernel, _) in FAULTS.items()}):
        choice = tuned("")
    assert tuple(choice.median_us) == (*CPU_VARIANTS, "triton_good")
    warnings = [line for line in capfd.readouterr().err.splitlines() if "does not use" in line]
    for name, (_, reason) in FAULTS.items():
        [warning] = [line for line in warnings if f"'triton_{name}'" in line]
        assert reason in warning and "[256, 256] @ [256, 256] of Float" in warning
    assert len(warnings) == len(FAULTS)


def test_no_result_outlives_its_check():
    """Kernels that write nothing, into memory in which another has left its result."""
    left: list[Tensor] = []

    def leaves(a: Tensor, b: Tensor) -> Tensor:
        left.append(exact(a, b))
        return left[-1]

    with kernels(leaves=leaves, finds=lambda a, b: left[0], finds_again=lambda a, b: left[1]):
        choice = tuned("")
    assert tuple(choice.median_us) == (*CPU_VARIANTS, "triton_leaves")


def test_the_check_draws_from_a_generator_of_its_own():
    state = torch.get_rng_state()
    with kernels(good=exact):
        tuned("")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_no_fault(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]):
    a, b = torch.randn(64, 8192, dtype=dtype), torch.randn(64, 8192, dtype=dtype).t()
    bias = torch.randn(64, dtype=dtype)
    with kernels(good=exact), cache_in(""):
        choice = tuning.tune_product(a, b, bias=bias, product_pass="forward")
    assert choice is not None and tuple(choice.median_us) == (*CPU_VARIANTS, "triton_good")
    assert "does not use" not in capfd.readouterr().err


# --- Ranks ----------------------------------------------------------------------------------------


def step(linear: nn.Linear, x: Tensor) -> list[Tensor]:
    linear.zero_grad()
    x = x.detach().requires_grad_()
    y = linear(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and linear.weight.grad is not None
    return [y.detach(), x.grad, linear.weight.grad]


def errs_on_rank_1() -> list[tuning.Choice]:
    linear, x = linear_and_input()
    last = exact if dist.get_rank() == 0 else one_nan
    with kernels(first=exact, last=last), cache_in(""):
        with tuning.warm_up():
            linear(x)
        return [choice for choice in tuning.choices() if choice.signature.startswith("mm_")]


def test_what_errs_on_one_rank_is_out_on_all(pool):
    ranks = pool(2).run(errs_on_rank_1)
    assert ranks[0] == ranks[1]
    [choice] = ranks[0]
    assert tuple(choice.median_us) == (*CPU_VARIANTS, "triton_first")


def unlisted_on_one_rank(rank: int) -> list[tuning.Choice]:
    linear, x = linear_and_input()
    with unlisted() if dist.get_rank() == rank else kernels(first=exact), cache_in(""):
        with tuning.warm_up():
            linear(x)
        return [choice for choice in tuning.choices() if choice.signature.startswith("mm_")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_say_what_it_offers_keeps_none_waiting(pool, rank: int):
    ranks = pool(2).run(unlisted_on_one_rank, rank)
    assert ranks[0] == ranks[1]
    [choice] = ranks[0]
    assert tuple(choice.median_us) == CPU_VARIANTS


def lacked_by_rank_1(directory: Path) -> tuple[set[str], float]:
    """Rank 0's disk says that its kernel won; rank 1 has none. What is chosen, and how far off."""
    linear, _ = linear_and_input()
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1))
    present = dist.get_rank() == 0
    with kernels(first=exact) if present else contextlib.nullcontext(), cache_in(directory):
        with tuning.warm_up():
            step(linear, x)
        for file in files(directory) if present else []:
            is_product = tomllib.loads(file.read_text())["signature"].startswith("mm_")
            edit(file, "triton_first" if is_product else "sequential")
        dist.barrier()
        tuning.clear()
        results = step(linear, x)
        chosen = {c.algorithm for c in tuning.choices() if c.signature.startswith("mm_")}
        linear.algorithm = "sequential"
        return chosen, max(map(relative_error, results, step(linear, x)))


def test_a_rank_that_lacks_a_kernel_computes_the_same(pool, tmp_path: Path):
    for chosen, error in pool(2).run(lacked_by_rank_1, tmp_path):
        assert chosen == {"triton_first"}
        assert error <= bound(torch.float32, 512)


# --- Triton ---------------------------------------------------------------------------------------


def test_triton_is_there_for_gpus_alone():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    usable = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    for op in ("axonn::_mm_triton", "axonn::_mm_triton_candidates"):
        assert has_kernel(op, "CUDA") == usable
        assert not has_kernel(op, "CPU")


def triton_products() -> list[str]:
    """The Triton matmul as the C++ side sees it; what is wrong with it."""
    products = importlib.import_module("axonn_ext.kernels.triton.products")
    library = Library("axonn", "IMPL")
    register.register_products(library, "CPU")
    mm, problems = torch.ops.axonn._tuned_mm, []
    try:
        for layout, with_bias in [("NT", True), ("NN", False), ("TN", True)]:
            dtype = torch.bfloat16  # the other one is only for GPUs
            a = laid_out(48, 64, layout[0], dtype, "cpu")
            b = laid_out(64, 80, layout[1], dtype, "cpu")
            bias = torch.randn(80).to(dtype) if with_bias else None
            version, *names = torch.ops.axonn._mm_triton_candidates(a, b, bias)
            want = a.double() @ b.double() + (0 if bias is None else bias.double())
            if not version[0].isdigit() or len(names) != products.NUM_OFFERED:
                problems.append(f"{layout}: {version} {names}")
            for name in names:
                error = relative_error(mm(a, b, bias, f"triton_{name}"), want)
                if not error <= bound(dtype, 64):
                    problems.append(f"{layout} {name}: {error}")
        if torch.ops.axonn._mm_triton_candidates(a.float(), b.float(), None):
            problems.append("float32 is offered")
        if torch.ops.axonn._mm_triton(a, b, None, "m1n1"):
            problems.append("an unknown config is taken")
    finally:
        library._destroy()
    return problems


def test_the_triton_matmul_by_its_configs(interpreter):
    assert interpreter.run(triton_products) == []
