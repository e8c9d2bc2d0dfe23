"""The Triton matmul in Triton's interpreter: values against float64, and what it refuses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from axonn_ext.triton.tile_configs import TileConfig
from triton_interpreter import Interpreter

pytestmark = pytest.mark.triton

BY_POINTER = TileConfig(16, 32, 16, 4, 2, group_m=2)
BY_DESCRIPTOR = TileConfig(32, 16, 16, 4, 2, descriptors=True)
SPLIT = TileConfig(16, 16, 16, 4, 2, split_k=3)
SPLIT_BY_DESCRIPTOR = TileConfig(16, 32, 16, 4, 2, split_k=2, descriptors=True)
DTYPES = ["fp32", "bf16", "fp16"]
LAYOUTS = ["NN", "NT", "TN", "TT", "SS"]


@pytest.fixture
def run(interpreter: Interpreter) -> Callable[..., Any]:
    """`run(function, *args)`: a function of this module, in the interpreter's process."""
    return interpreter.run


def failures_of(cases: list[dict[str, Any]], configs: list[TileConfig | None]) -> list[str]:
    module = importlib.import_module("triton_cases")
    return module.check_matmul([module.MatmulCase(**case) for case in cases], configs, "cpu")


def failures_with_tf32(cases: list[dict[str, Any]], configs: list[TileConfig | None]) -> list[str]:
    """Likewise, where float32 may be rounded to tf32; the interpreter never does."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return failures_of(cases, configs)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def grid(**axes: list[Any]) -> list[dict[str, Any]]:
    """Every combination."""
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
    assert run(failures_with_tf32, cases, [BY_DESCRIPTOR, SPLIT_BY_DESCRIPTOR]) == []


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_epilogue(run, bias, activation):
    cases = grid(m=[19], n=[40], k=[48], dtype=DTYPES, bias=[bias], activation=[activation])
    configs = [BY_POINTER, SPLIT, BY_DESCRIPTOR, SPLIT_BY_DESCRIPTOR]
    assert run(failures_with_tf32, cases, configs) == []


SHAPES = [(1, 1, 1), (1, 64, 48), (7, 1, 3), (2, 3, 65), (16, 32, 16), (70, 5, 1), (5, 129, 17)]
EMPTY = [(0, 4, 3), (4, 0, 3), (4, 6, 0), (0, 0, 0)]


def test_ragged_shapes(run):
    cases = [{"m": m, "n": n, "k": k, "bias": True} for m, n, k in SHAPES]
    assert run(failures_of, cases, [BY_POINTER, None]) == []


def test_empty_shapes(run):
    cases = [
        {"m": m, "n": n, "k": k, "bias": bias, "activation": activation, "dtype": "bf16"}
        for m, n, k in EMPTY
        for bias, activation in ((False, None), (True, "gelu"), (True, "swiglu"))
    ]
    assert run(failures_of, cases, [BY_POINTER, None]) == []


def swiglu_of_extremes() -> torch.Tensor:
    matmul = importlib.import_module("axonn_ext.triton.matmul").matmul
    a = torch.tensor([[1e4], [-1e4], [0.0]])
    b = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    return torch.cat([matmul(a, b, activation="swiglu"), matmul(a, b, activation="gelu")], dim=1)


def test_activations_do_not_overflow(run):
    # silu(gate) * up of (x, x) and (-x, x); gelu of x, x, -x, x.
    big, y = 1e4, run(swiglu_of_extremes)
    expected = [
        [big * big, 0, big, big, 0, big], [0, -big * big, 0, 0, big, 0], [0, 0, 0, 0, 0, 0]
    ]  # fmt: skip
    torch.testing.assert_close(y, torch.tensor(expected))


def equal_bits() -> bool:
    cases = importlib.import_module("triton_cases")
    a = cases.draw(20, 200, dtype=torch.float32, device="cpu", seed=0)
    b = cases.draw(200, 20, dtype=torch.float32, device="cpu", seed=1)
    matmul = importlib.import_module("axonn_ext.triton.matmul").matmul
    return all(
        torch.equal(matmul(a, b, config=config), matmul(a, b, config=config))
        for config in (BY_POINTER, SPLIT)
    )


def test_equal_calls_give_equal_bits(run):
    assert run(equal_bits)


def offsets_beyond_32_bits() -> list[torch.Tensor]:
    """Rows, then columns, 2^30 elements apart: the last is 3 * 2^32 bytes behind the first."""
    matmul = importlib.import_module("axonn_ext.triton.matmul").matmul
    storage = torch.empty(0).new_empty(3 * 2**30 + 4)  # pages that are not touched cost nothing
    a = storage.as_strided((4, 4), (2**30, 1))
    a.copy_(torch.arange(16.0).view(4, 4))
    products = (
        matmul(a, torch.eye(4), config=BY_POINTER),
        matmul(torch.eye(4), a.t(), config=BY_POINTER),
    )
    return [*products, a.clone()]


def test_offsets_have_64_bits(run):
    by_rows, by_columns, want = run(offsets_beyond_32_bits)
    assert torch.equal(by_rows, want) and torch.equal(by_columns, want.t())


def error_of(call: str) -> str:
    """What a call of matmul with these arguments raises."""
    matmul = importlib.import_module("axonn_ext.triton.matmul").matmul
    names = {"torch": torch, "matmul": matmul, "TileConfig": TileConfig}
    names |= {"a": torch.ones(4, 6), "b": torch.ones(6, 8)}
    try:
        eval(call, names)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("matmul(a[0], b)", "ValueError: matmul: a must have 2 dims, got (6,)"),
        ("matmul(a, b.double())", "TypeError: matmul: b must be one of bfloat16, float16, float32, "
         "got torch.float64"),
        ("matmul(a, b.half())", "TypeError: matmul: a and b must agree, got torch.float32 on cpu "
         "and torch.float16 on cpu"),
        ("matmul(a, a)", "ValueError: matmul: a.size(1) must be b.size(0), got (4, 6) and (4, 6)"),
        ("matmul(a.to('meta'), b)", "ValueError: matmul: a must be on a GPU (or, in Triton's "
         "interpreter, on the CPU), got meta"),
        ("matmul(a, b.requires_grad_())", "ValueError: matmul: b requires grad, and there is no "
         "gradient formula; call it under torch.no_grad()"),
        ("matmul(a, b, activation='relu')", "ValueError: matmul: activation must be None or one of "
         "gelu, swiglu, got 'relu'"),
        ("matmul(a, b[:, :7], activation='swiglu')", "ValueError: matmul: swiglu needs pairs of "
         "columns, got b.size(1)=7"),
        ("matmul(a, b, bias=torch.ones(7))", "ValueError: matmul: bias must be torch.float32 [8] "
         "on cpu, got torch.float32 [7] on cpu"),
        ("matmul(a, b, config=TileConfig(16, 16, 16, 4, 2, descriptors=True))",
         "ValueError: matmul: config m16n16k16w4s2g8p1t on sm_90: descriptors feed tensor cores, "
         "which do not multiply full float32"),
        ("matmul(a.half(), b.half(), config=TileConfig(16, 16, 16, 4, 2, descriptors=True))",
         "ValueError: matmul: config m16n16k16w4s2g8p1t on sm_90: descriptors need operands of "
         "16-byte aligned rows or columns that are not empty"),
    ],
)  # fmt: skip
def test_what_is_refused(run, call, message):
    assert run(error_of, call) == message
