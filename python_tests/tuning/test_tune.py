"""A product in several ways: equal values, the fastest by a margin, agreed and kept."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from axonn_ext import GridShape, models, nn, warm_up
from axonn_ext.calibrate.products import measure_product
from axonn_ext.kernels import tuning
from axonn_ext.models import ModelConfig
from axonn_ext.spec.products import Product, linear_products
from axonn_ext.verify.products import laid_out
from grids import bound, grid_of, relative_error
from product_cases import CPU_VARIANTS, K, M, N, linear_and_input
from tuning_cache import cache_in, edit, files

MARGIN = 0.05


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """This process keeps its measurements there."""
    folder = tmp_path / "cache"
    with cache_in(folder):
        yield folder


def check_variants(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype, device: str, names: list[str]
) -> None:
    m, n, k = shape
    a = laid_out(m, k, layout[0], dtype, device)
    b = laid_out(k, n, layout[1], dtype, device)
    bias = laid_out(1, n, "N", dtype, device)[0]
    for addend in (None, bias):
        exact = a.double() @ b.double() + (0 if addend is None else addend.double())
        library = relative_error(a @ b if addend is None else a @ b + addend, exact)
        for name in names:
            got = torch.ops.axonn._tuned_mm(a, b, addend, name)
            assert got.is_contiguous() and got.dtype == dtype and got.shape == (m, n), name
            assert relative_error(got, exact) <= 2 * library + bound(dtype, max(k, 1)), name
            assert torch.equal(got, torch.ops.axonn._tuned_mm(a, b, addend, name)), name


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT", "SN", "NS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 96, 32), (1, 7, 5), (33, 1, 129), (17, 31, 1), (0, 4, 3), (4, 0, 3), (4, 3, 0)]
)
def test_every_variant_has_the_same_values(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype
):
    check_variants(shape, layout, dtype, "cpu", list(CPU_VARIANTS))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 384, 128), (33, 17, 129), (8, 4096, 64)])
def test_every_variant_has_the_same_values_on_a_gpu(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype
):
    check_variants(shape, layout, dtype, "cuda", list(CPU_VARIANTS))


def test_operands_that_do_not_fit_are_named():
    mm, a = torch.ops.axonn._tuned_mm, torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"a\.size\(1\)=3 must equal b\.size\(0\)=4"):
        mm(a, a, None, "direct")
    with pytest.raises(ValueError, match=r"variant must be direct, .* got 'fast'"):
        mm(a, a.t(), None, "fast")
    with pytest.raises(ValueError, match=r"bias must have shape \[4\], got \[3\]"):
        mm(a, a.t(), torch.ones(3), "direct")
    with pytest.raises(TypeError, match="bias has dtype Double, expected Float"):
        mm(a, a.t(), torch.ones(4, dtype=torch.float64), "direct")
    with pytest.raises(TypeError, match="bias has dtype BFloat16, expected Float"):
        tuning.tune_product(a, a.t(), bias=torch.ones(4).bfloat16(), product_pass="forward")
    with pytest.raises(NotImplementedError, match="'fused_sm90' is not built or not used here"):
        mm(a, a.t(), None, "fused_sm90")
    with pytest.raises(ValueError, match=r"product_pass must be one of .* got 'backward'"):
        tuning.tune_product(a, a.t(), product_pass="backward")


# --- What is chosen -------------------------------------------------------------------------------


def test_the_fastest_is_chosen_by_a_margin_and_kept(cache: Path):
    a, b = torch.randn(M, K), torch.randn(N, K).t()
    choice = tuning.tune_product(a, b, product_pass="forward")
    assert choice is not None and choice.source == "measured" and choice.group == ""
    assert tuple(choice.median_us) == CPU_VARIANTS
    best = min(choice.median_us, key=lambda name: choice.median_us[name])
    near = choice.median_us["direct"] <= (1 + MARGIN) * choice.median_us[best]
    assert choice.algorithm == ("direct" if near else best)
    [file] = files(cache)
    assert tomllib.loads(file.read_text())["signature"] == choice.signature
    assert tuning.tune_product(a, b, product_pass="forward") == choice
    tuning.clear()
    again = tuning.tune_product(a, b, product_pass="forward")
    assert again is not None and (again.source, again.algorithm) == ("disk", choice.algorithm)


def test_layout_size_dtype_and_pass_are_measured_apart(cache: Path):
    a = torch.randn(M, K)
    products = [
        (a, a, "dgrad"),
        (a, a.t(), "dgrad"),
        (a.t(), a, "dgrad"),
        (a, a, "wgrad"),
        (a.double(), a.double(), "dgrad"),
        (a, torch.randn(K, N + 1), "dgrad"),
    ]
    found = [tuning.tune_product(a, b, product_pass=name) for a, b, name in products]
    signatures = {choice.signature for choice in found if choice is not None}
    assert len(signatures) == len(products) == len(files(cache))


def test_small_products_are_not_asked_about(cache: Path):
    assert tuning.tune_product(torch.ones(8, 8), torch.ones(8, 8), product_pass="wgrad") is None
    assert tuning.tune_product(torch.ones(0, 8), torch.ones(8, 8), product_pass="wgrad") is None
    assert tuning.choices() == [] and files(cache) == []


# --- In a Linear ----------------------------------------------------------------------------------


def shapes_of_products(linear: nn.Linear, x: Tensor) -> tuple[list[list[list[int]]], list[Tensor]]:
    """The operands of every aten::mm of one forward and backward, and its results."""
    linear.zero_grad()
    x = x.detach().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        y = linear(x)
        y.backward(torch.ones_like(y))
    calls = [e.input_shapes[:2] for e in recorded.events() if e.name == "aten::mm"]
    assert x.grad is not None and linear.weight.grad is not None
    return calls, [y.detach(), x.grad, linear.weight.grad]


def tune_linear(directory: Path) -> list[tuning.Choice]:
    linear, x = linear_and_input()
    with cache_in(directory):
        with warm_up():
            shapes_of_products(linear, x)
        return tuning.choices()


def run_linear(directory: Path) -> tuple[list[list[list[int]]], list[Tensor], list[str]]:
    linear, x = linear_and_input()
    with cache_in(directory):
        calls, results = shapes_of_products(linear, x)
        chosen = [f"{c.signature.split()[0]} {c.algorithm} {c.source}" for c in tuning.choices()]
        return calls, results, chosen


def test_a_linear_multiplies_as_was_measured_and_ranks_agree(pool, tmp_path: Path):
    """On the disk of rank 0 another variant is said to win; rank 1 has no disk."""
    kept, none = tmp_path / "kept", tmp_path / "none"
    answers = pool(2).run(tune_linear, kept)
    assert answers[0] == answers[1]
    names = [choice.signature.split()[0] for choice in answers[0]]
    assert names == ["linear_backward", "linear_forward", "mm_dgrad", "mm_forward", "mm_wgrad"]
    assert {choice.source for choice in answers[0]} == {"measured"}

    for file in files(kept):
        is_product = tomllib.loads(file.read_text())["signature"].startswith("mm_")
        edit(file, "direct" if is_product else "sequential")
    direct_calls, direct, chosen = pool(2).run(run_linear, kept)[0]
    products = [[[256, 512], [512, 256]], [[256, 256], [256, 512]], [[256, 256], [256, 512]]]
    assert direct_calls == products
    assert chosen[2:] == ["mm_dgrad direct disk", "mm_forward direct disk", "mm_wgrad direct disk"]

    for file in files(kept):
        if tomllib.loads(file.read_text())["signature"].startswith("mm_"):
            edit(file, "transposed")
    answers = pool(2).run(run_first_rank_has, [kept, none])
    assert answers[0][2] == answers[1][2]
    for calls, results, chosen in answers:
        assert calls == [[b[::-1], a[::-1]] for a, b in products]
        assert chosen[3] == "mm_forward transposed disk"
        assert len(results) == 3
    for got, want in zip(answers[0][1], direct, strict=True):
        assert relative_error(got, want) <= bound(torch.float32, 512)


def run_first_rank_has(
    directories: list[Path],
) -> tuple[list[list[list[int]]], list[Tensor], list[str]]:
    return run_linear(directories[torch.distributed.get_rank()])


def linear_of_one_gpu() -> list[tuple[str, str]]:
    linear = nn.Linear(
        256, 512, grid=grid_of(GridShape()), role="expand", device="cuda", dtype=torch.bfloat16
    )
    x = torch.ones(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with cache_in(""), warm_up():
        y = linear(x)
        y.backward(torch.ones_like(y))
        return [(choice.group, choice.signature.split()[0]) for choice in tuning.choices()]


@pytest.mark.gpu
@pytest.mark.timing
def test_a_linear_of_one_gpu_measures_its_products(gpu_pool):
    names = [[("", "mm_dgrad"), ("", "mm_forward"), ("", "mm_wgrad")]]
    assert gpu_pool(1).run(linear_of_one_gpu) == names


def named_algorithm() -> tuple[list[str], bool]:
    linear, x = linear_and_input()
    linear.algorithm = "sequential"
    with cache_in(""):
        _, before = shapes_of_products(linear, x)
        with warm_up():
            _, inside = shapes_of_products(linear, x)
        same = all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
        return [choice.signature for choice in tuning.choices()], same


def test_a_named_algorithm_asks_nothing(pool):
    assert pool(2).run(named_algorithm) == [([], True)] * 2


def test_what_a_job_measured_serves_the_command(pool, tmp_path: Path):
    pool(2).run(tune_linear, tmp_path)
    with cache_in(tmp_path):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the ranks of the pool
        try:
            row = measure_product(
                Product("wgrad", ("up",), 256, 512, 256, "TN", False), torch.float32, "cpu"
            )
        finally:
            torch.set_num_threads(threads)
    assert row.source == "disk"


# --- The products of a model ----------------------------------------------------------------------


def recorded_products(shape: GridShape, config: ModelConfig) -> set[tuple[int, ...]]:
    """Sizes of the matrix products that a step of the model makes on this rank."""
    parallel = models.ParallelConfig(algorithm="sequential")
    model = models.build(config, grid_of(shape), parallel)
    ids = torch.zeros(4 // (shape.data * shape.z), config.sequence_length, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        model.loss(ids, ids).backward()
    calls = [e.input_shapes[:2] for e in recorded.events() if e.name == "aten::mm"]
    return {(a[0], b[1], a[1]) for a, b in calls}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("shape", [GridShape(x=2), GridShape(y=2), GridShape(z=2)])
def test_the_list_of_products_is_what_a_model_multiplies(pool, family: str, shape: GridShape):
    # Tied, the head's weight would come gathered: a Linear of one rank, which the CPU always fuses.
    config = ModelConfig(128, 48, 1, 4, 16, family=family, tie_embeddings=False)
    listed = linear_products(config, shape, batch_size=4, adds_bias=False)
    assert {p.product_pass for p in listed} == {"forward", "dgrad", "wgrad"}
    expected = {(p.m, p.n, p.k) for p in listed}
    assert pool(2).run(recorded_products, shape, config) == [expected] * 2


def test_a_lookup_of_an_unknown_product_is_cheap():
    """Next to the product, which takes a hundred times as long here."""
    a = torch.ones(M, K)

    def seconds(call: Callable[[], object], *, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times

    with cache_in(""):
        tune_mm = torch.ops.axonn._tune_mm.default
        lookup = min(seconds(lambda: tune_mm(a, a, None, "mm_dgrad"), times=500) for _ in range(20))
    product = min(seconds(lambda: a @ a, times=10) for _ in range(20))
    assert lookup < product / 10
