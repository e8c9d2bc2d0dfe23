"""The Triton matmul in Triton's interpreter: values against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axonn_ext.kernels.triton.tile_configs import TileConfig
from triton_interpreter import Interpreter

pytestmark = pytest.mark.triton

BY_POINTER = TileConfig(16, 32, 16, 4, 2, group_m=2)
BY_DESCRIPTOR = TileConfig(32, 16, 16, 4, 2, descriptors=True)
SPLIT = TileConfig(16, 16, 16, 4, 2, split_k=3)
SPLIT_BY_DESCRIPTOR = TileConfig(16, 32, 16, 4, 2, split_k=2, descriptors=True)
DTYPES = ["bf16", "fp16"]
LAYOUTS = ["NN", "NT", "TN", "TT", "SS"]


@pytest.fixture
def run(interpreter: Interpreter) -> Callable[..., Any]:
    """`run(function, *args)` calls a function of this module in the interpreter's process."""
    return interpreter.run


def failures_of(cases: list[dict[str, Any]], configs: list[TileConfig | None]) -> list[str]:
    module = importlib.import_module("triton_cases")
    return module.check_matmul([module.MatmulCase(**case) for case in cases], configs, "cpu")


def grid(**axes: list[Any]) -> list[dict[str, Any]]:
    """Every combination of the values."""
    cases: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        cases = [{**case, name: value} for case in cases for value in values]
    return cases


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(run, layout):
    cases = grid(m=[33], n=[50], k=[35], dtype=DTYPES, layout=[layout])
    assert run(failures_of, cases, [BY_POINTER, SPLIT, None]) == []


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_descriptors(run, layout):
    cases = grid(m=[40], n=[56], k=[48], dtype=DTYPES, layout=[layout])
    assert run(failures_of, cases, [BY_DESCRIPTOR, SPLIT_BY_DESCRIPTOR]) == []


def test_bias(run):
    cases = grid(m=[19], n=[40], k=[48], dtype=DTYPES, bias=[False, True])
    configs = [BY_POINTER, SPLIT, BY_DESCRIPTOR, SPLIT_BY_DESCRIPTOR]
    assert run(failures_of, cases, configs) == []


SHAPES = [(1, 1, 1), (1, 64, 48), (7, 1, 3), (2, 3, 65), (16, 32, 16), (70, 5, 1), (5, 129, 17)]


def test_ragged_shapes(run):
    cases = [{"m": m, "n": n, "k": k, "bias": True} for m, n, k in SHAPES]
    assert run(failures_of, cases, [BY_POINTER, None]) == []


def equal_bits() -> bool:
    cases = importlib.import_module("triton_cases")
    a = cases.draw(20, 200, dtype=torch.bfloat16, device="cpu", seed=0)
    b = cases.draw(200, 20, dtype=torch.bfloat16, device="cpu", seed=1)
    return all(
        torch.equal(cases.product(a, b, config=config), cases.product(a, b, config=config))
        for config in (BY_POINTER, SPLIT)
    )


def test_equal_calls_give_equal_bits(run):
    assert run(equal_bits)


def offsets_beyond_32_bits() -> list[torch.Tensor]:
    """Products with rows, then columns, 2^30 elements apart: 3 * 2^31 bytes from first to last."""
    product = importlib.import_module("triton_cases").product
    eye = torch.eye(4, dtype=torch.bfloat16)
    storage = eye.new_empty(3 * 2**30 + 4)  # untouched pages take no memory
    a = storage.as_strided((4, 4), (2**30, 1))
    a.copy_(torch.arange(16.0).view(4, 4))
    products = (product(a, eye, config=BY_POINTER), product(eye, a.t(), config=BY_POINTER))
    return [*products, a.clone()]


def test_offsets_have_64_bits(run):
    by_rows, by_columns, want = run(offsets_beyond_32_bits)
    assert torch.equal(by_rows, want) and torch.equal(by_columns, want.t())
