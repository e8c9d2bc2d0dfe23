"""The benchmarks: they time correct results, and report no time for wrong ones."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from axonn_ext import GridShape
from axonn_ext.bench.case import Case, Spec
from axonn_ext.bench.reference import Expected, Outputs, Whole, expected_product, judge, round_off
from axonn_ext.bench.report import plot_rows, print_group
from axonn_ext.bench.results import Ratios, Row, content_of, read_rows
from axonn_ext.bench.run import NUM_WARM_UP_CALLS, build_case, run_case
from axonn_ext.calibrate.measure import Ranks, measure
from axonn_ext.calibrate.shapes import (
    OPS,
    BlockShape,
    GemmShape,
    Shape,
)
from axonn_ext.terminal.rows import RowsFile
from grids import grid_of

PNG = b"\x89PNG\r\n\x1a\n"
EXPAND = {"role": "expand", "layout": "sharded"}
SEQUENTIAL_AND_FUSED = ("sequential", "fused")
TINY: dict[str, Shape] = {
    "ag-gemm": GemmShape(24, 16, 40),
    "gemm-rs": GemmShape(24, 7, 16),
    "gemm-ar": GemmShape(5, 9, 16),
    "linear": GemmShape(32, 24, 16),
    "block": BlockShape(8, 6, 32, 4),
}


def tiny_spec(op: str, grid: str, *, dtype: str = "fp32", **options: str) -> Spec:
    defaults = {"linear": EXPAND, "block": {"layout": "sharded"}}.get(op, {})
    shape = GridShape.parse(grid)
    return Spec(op, TINY[op], shape, dtype, SEQUENTIAL_AND_FUSED, defaults | options)


def build(spec: Spec) -> Case:
    return build_case(spec, grid_of(spec.grid))


# --- Results that are wrong -----------------------------------------------------------------------


class Broken:
    """A broken op: `spoil` changes its outputs after the first `first` calls."""

    def __init__(
        self, op: Callable[[], Outputs], spoil: Callable[[dict[str, Tensor]], None], first: int = 0
    ) -> None:
        self.op, self.spoil, self.first, self.num_calls = op, spoil, first, 0

    def __call__(self) -> Outputs:
        outputs = {name: tensor.clone() for name, tensor in self.op().items()}
        self.num_calls += 1
        if self.num_calls > self.first:
            self.spoil(outputs)
        return outputs


def scale(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda outputs: outputs.update({name: outputs[name] * 1.001})


def set_last(value: float) -> Callable[[dict[str, Tensor]], None]:
    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["y"].view(-1)[-1] = value

    return spoil


def on_rank_1(spoil: Callable[[dict[str, Tensor]], None]) -> Callable[[dict[str, Tensor]], None]:
    rank = torch.distributed.get_rank()
    return spoil if rank == 1 else lambda outputs: None


def time_with_wrong_ones(op: str, dtype: str) -> tuple[list[Row], dict[str, int]]:
    """The rows of a case with right and wrong algorithms, and the calls of the wrong ones."""
    case = build(tiny_spec(op, "x=2", dtype=dtype))
    right = case.algorithms["fused"]
    wrong = {
        "scaled": Broken(right, scale("y")),
        "wrong on one rank": Broken(right, on_rank_1(scale("y"))),
        "one element": Broken(right, on_rank_1(set_last(1.0))),
        "not a number": Broken(right, set_last(math.nan)),
        "other shape": Broken(right, lambda outputs: outputs.update(y=outputs["y"][:-1])),
        "missing": Broken(right, lambda outputs: outputs.clear()),
        "wrong later": Broken(right, scale("y"), first=NUM_WARM_UP_CALLS),
    }
    if op == "linear":
        wrong["gradient"] = Broken(right, on_rank_1(scale("dweight")))
    if op == "block":
        wrong["gradient"] = Broken(right, on_rank_1(scale("norm_1.weight")))
    case = dataclasses.replace(case, algorithms={**case.algorithms, **wrong})
    rows = run_case(case, Ranks(), rounds=2, min_batch_seconds=1e-3)
    return rows, {name: broken.num_calls for name, broken in wrong.items()}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("gemm-rs", "fp32"), ("gemm-ar", "fp64"), ("linear", "fp32"), ("block", "fp32")],
)
def test_a_wrong_result_is_refused_a_time(pool, op: str, dtype: str) -> None:
    answers = pool(2).run(time_with_wrong_ones, op, dtype)
    assert answers[0][0] == answers[1][0], "all ranks agree"
    rows = {row.algorithm: row for row in answers[0][0]}
    for name in SEQUENTIAL_AND_FUSED:
        row = rows.pop(name)
        assert row.correct and row.median_us > 0 and row.min_us <= row.median_us
        assert row.rel_error <= row.error_limit
        assert row.ratio_to_floor == row.median_us / row.floor_us
    wrong_calls = answers[0][1]
    assert set(rows) == set(wrong_calls)
    for name, row in rows.items():
        assert not row.correct, name
        times = (row.median_us, row.min_us, row.iqr_us, row.speedup, row.ratio_to_floor,
                 row.hidden_share, row.overlap_efficiency)  # fmt: skip
        assert times == (None,) * 7, name
        if name != "wrong later":
            assert wrong_calls[name] == NUM_WARM_UP_CALLS, f"{name} was timed"
    assert wrong_calls["wrong later"] > NUM_WARM_UP_CALLS, "it passes the first check"
    for name in ("scaled", "wrong on one rank", "wrong later"):
        assert rows[name].rel_error == pytest.approx(1e-3, rel=0.3), name
    for name in ("not a number", "other shape", "missing"):
        assert rows[name].rel_error is None, name
    if "gradient" in rows:
        assert rows["gradient"].worst_output in ("dweight", "norm_1.weight")


def test_a_wrong_result_shows(tmp_path: Path) -> None:
    right = Row(
        op="linear", grid=GridShape(x=2).as_dict(), shape={"M": 4, "N": 8, "K": 16}, dtype="fp32",
        options=EXPAND, algorithm="sequential", correct=True, median_us=20.0, min_us=19.0,
        iqr_us=3.0, floor_us=10.0, floor_iqr_us=0.1, collective_us=5.0, collective_iqr_us=0.1,
        speedup=1.0, ratio_to_floor=2.0, hidden_share=0.0, overlap_efficiency=-1.0, rel_error=1e-7,
        error_limit=1e-6, worst_output="y", batches=30, calls_per_batch=2500, threads=1,
    )  # fmt: skip
    nothing = dict.fromkeys(
        ("median_us", "min_us", "iqr_us", "speedup", "ratio_to_floor", "hidden_share"), None
    )
    wrong = dataclasses.replace(
        right, algorithm="fused", correct=False, rel_error=1e-3, worst_output="dx", **nothing
    )
    out = io.StringIO()
    print_group(Console(file=out, width=100), [right, wrong], cores=1)
    text = out.getvalue()
    assert re.search(r"fused +wrong result( +-)+ +1.0e-03", text)
    assert "fused is wrong and gets no time: the relative error of dx is 1.0e-03" in text
    assert "fastest: sequential, 2.00 x compute alone\n" in text
    assert "2 ranks of 1 thread share 1 cores" in text
    assert "noisy" in text, "3 is more than a tenth of 20"
    plot_rows([right, wrong], "a machine", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)
    RowsFile("--json", tmp_path / "rows.json").write(content_of({}, [right, wrong]))
    assert read_rows(tmp_path / "rows.json") == [right, wrong]


# --- Correct results ------------------------------------------------------------------------------

SPECS = [
    *(tiny_spec(op, grid) for op in ("ag-gemm", "gemm-rs", "gemm-ar") for grid in ("x=2", "x=4")),
    tiny_spec("gemm-rs", "x=2", dtype="bf16"),
    *(
        tiny_spec("linear", grid, role=role, layout=layout)
        for grid in ("x=2", "y=2", "z=2", "x=2,y=2", "y=2,z=2", "x=2,z=2", "x=1")
        for role in ("expand", "contract")
        for layout in ("sharded", "replicated")
    ),
    tiny_spec("linear", "x=2,y=2", dtype="bf16"),
    *(tiny_spec("block", grid) for grid in ("x=2", "y=2", "z=2", "x=2,y=2", "y=2,z=2", "x=1")),
    tiny_spec("block", "x=2,y=2", layout="replicated"),
    tiny_spec("block", "x=2,y=2", dtype="fp64"),
    tiny_spec("block", "x=2,y=2", dtype="bf16"),
]


def gloo_calls(call: Callable[[], object]) -> Counter[tuple[str, int]]:
    """The collectives that gloo ran, with their numbers of elements."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    return Counter(
        (event.name, math.prod(event.input_shapes[0]))
        for event in profiled.events()
        if event.name.startswith("gloo:")
    )


def check_case(spec: Spec) -> list[str]:
    """Failures of a case: wrong results, or a floor or collective that is not part of the op."""
    case, found = build(spec), []
    for name, call in case.algorithms.items():
        verdict = judge(case.complete(call()), case.expected, Ranks())
        if not verdict.correct:
            found.append(f"{spec} {name}: {verdict}")
    case.floor()
    sent = gloo_calls(case.algorithms["sequential"])
    alone = gloo_calls(case.collective) if case.collective is not None else Counter()
    if sent != alone:
        found.append(f"{spec}: sequential sends {sent}, the collectives alone {alone}")
    if gloo_calls(case.floor):
        found.append(f"{spec}: the floor communicates")
    if spec.grid.size > 1 and not sent:
        found.append(f"{spec}: sequential sends nothing")
    return found


@pytest.mark.parametrize("op", OPS)
def test_right_results_pass_and_the_parts_are_those_of_the_whole(pool, op: str) -> None:
    for spec in SPECS:
        if spec.op == op:
            for found in pool(spec.grid.size).run(check_case, spec):
                assert not found, "\n".join(found)


def matmul_sizes(call: Callable[[], object]) -> Counter[tuple[int, ...]]:
    """Rows, inner size and columns of every torch.mm, called by any op."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    return Counter(
        (*event.input_shapes[0], event.input_shapes[1][1])
        for event in profiled.events()
        if event.name == "aten::mm"
    )


def compare_matmuls(spec: Spec) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    case = build(spec)
    return matmul_sizes(case.floor), matmul_sizes(case.algorithms["sequential"])


@pytest.mark.parametrize("op", OPS)
def test_the_floor_is_the_matmuls_of_sequential(pool, op: str) -> None:
    for spec in SPECS:
        if spec.op == op and spec.grid.size == 4:
            for floor, sequential in pool(4).run(compare_matmuls, spec):
                assert floor == sequential, spec
                assert floor.total() == {"linear": 3, "block": 12}.get(op, 1), spec


def test_a_large_product_is_checked_in_part() -> None:
    a = Whole("a", 2049, 1024, torch.float32)
    b = Whole("b", 1024, 2056, torch.float32)
    left, right = a.block(a.rows, a.columns), b.block(b.rows, b.columns)
    expected = expected_product(
        lambda rows: a.take(rows, a.columns), lambda columns: b.take(b.rows, columns),
        rows=range(1, 2049), columns=b.columns, terms=1024, limit=round_off(torch.float32, 1024),
    )  # fmt: skip
    assert expected.values.shape == (256, 256)
    product = left @ right
    assert expected.error(product[1:]) <= expected.limit < expected.error(product[:-1])


def test_a_product_with_a_large_operand_is_checked_in_part() -> None:
    """This holds even with few rows, as every rank of a host would hold the operand in float64."""
    terms = 1 << 14
    expected = expected_product(
        lambda rows: torch.ones(len(rows), terms), lambda columns: torch.ones(terms, len(columns)),
        rows=range(3), columns=range(1 << 13), terms=terms, limit=0.0,
    )  # fmt: skip
    assert expected.values.shape == (3, 256)
    assert expected.error(torch.full((3, 1 << 13), float(terms))) == 0.0


def test_blocks_are_parts_of_one_matrix() -> None:
    whole = Whole("a", 6, 5, torch.bfloat16)
    everything = whole.block(whole.rows, whole.columns)
    assert torch.equal(whole.block(range(2, 5), range(1, 3)), everything[2:5, 1:3])
    assert torch.equal(whole.take([4, 0], [1, 3]), everything[[4, 0]][:, [1, 3]].double())
    assert not torch.equal(
        everything, Whole("b", 6, 5, torch.bfloat16).block(whole.rows, whole.columns)
    )


def test_errors_are_relative_to_the_largest_value() -> None:
    expected = Expected(torch.tensor([[4.0, -8.0]], dtype=torch.float64), limit=0.1)
    assert expected.error(torch.tensor([[4.0, -7.0]])) == 0.125
    assert expected.error(torch.tensor([[4.0, math.nan]])) == math.inf
    assert expected.error(torch.tensor([4.0, -8.0])) == math.inf


# --- Measuring ------------------------------------------------------------------------------------


def time_sleeps() -> dict[str, object]:
    order: list[str] = []
    collected: list[bool] = []
    rank = torch.distributed.get_rank()
    sleeps = {"same": 2e-3, "slow on rank 1": 5e-3 * rank, "nothing": 0.0}

    def sleep(name: str) -> Callable[[], str]:
        def call() -> str:
            if not order or order[-1] != name:
                order.append(name)
            collected.append(gc.isenabled())
            time.sleep(sleeps[name])
            return f"{name} {rank}"

        return call

    timings = measure(
        {name: sleep(name) for name in sleeps}, Ranks(), rounds=6, min_batch_seconds=0.01
    )
    return {
        "samples": {name: t.samples_us for name, t in timings.items()},
        "calls": {name: t.calls_per_batch for name, t in timings.items()},
        "last": {name: t.last for name, t in timings.items()},
        "order": order[len(sleeps) :],  # without the batches that determined the number of calls
        "collected": any(collected),
        "collector is back": gc.isenabled(),
    }


def test_measure(pool) -> None:
    first, second = pool(2).run(time_sleeps)
    for key in ("samples", "calls"):
        assert first[key] == second[key], "the slowest rank's time is everyone's"
    assert all(len(samples) == 6 for samples in first["samples"].values())
    assert min(first["samples"]["same"]) >= 2e3
    assert min(first["samples"]["slow on rank 1"]) >= 5e3, "rank 0 alone would take no time"
    for name, samples in first["samples"].items():
        assert samples[-1] * first["calls"][name] >= 0.01e6 * 0.999, "too short a batch"
    assert first["last"]["same"] == "same 0" and second["last"]["same"] == "same 1"
    assert not first["collected"] and first["collector is back"]
    names = list(first["samples"])
    rounds = [[*names[i:], *names[:i]] for i in range(3)]
    visits = [name for order in [*rounds, *(order[::-1] for order in rounds)] for name in order]
    # The last name of a round may be the first of the next; `order` shows them only once.
    expected = [n for i, n in enumerate(visits) if i == 0 or visits[i - 1] != n]
    assert first["order"] == expected


def test_ratios() -> None:
    ratios = Ratios.of(12.0, sequential=20.0, floor=10.0, collective=4.0)
    assert ratios == Ratios(
        speedup=20 / 12, ratio_to_floor=1.2, hidden_share=0.8, overlap_efficiency=0.5
    )
    assert Ratios.of(None, sequential=20.0, floor=10.0, collective=4.0) == Ratios(*[None] * 4)
    assert Ratios.of(12.0, sequential=9.0, floor=10.0, collective=None) == Ratios(
        speedup=0.75, ratio_to_floor=1.2, hidden_share=None, overlap_efficiency=None
    )
    assert Ratios.of(12.0, sequential=None, floor=10.0, collective=4.0).hidden_share is None
