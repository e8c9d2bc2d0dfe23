"""`axonn-ext bench ops`: results are checked, ratios are right, rows appear one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_ext.bench.ops import OPS, OpRow, run_case
from axonn_ext.bench.ops_cases import (
    CASES,
    OURS,
    TORCH,
    OpCase,
    Sizes,
    moments_problem,
    sum_problem,
)
from axonn_ext.cli.main import main

SMALL = Sizes(elements=70_000, slots=4, dtype="bf16", device="cpu")
SMALL_OPTIONS = (
    "--device", "cpu", "--elements", "70000", "--slots", "4", "--rounds", "1",
)  # fmt: skip


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- Correct results -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", OPS.dtypes)
@pytest.mark.parametrize("op", CASES)
def test_every_way_is_right(op: str, dtype: str) -> None:
    case = CASES[op](dataclasses.replace(SMALL, dtype=dtype))
    assert list(case.ways) == [OURS, TORCH]
    for name, way in case.ways.items():
        assert way.problem() == "", name
    for name, way in case.ways.items():
        way.call()
        assert way.problem() == "", f"{name}, after a call"


def test_bytes_that_must_be_moved() -> None:
    moved = {
        op: [way.moved_bytes for way in build(SMALL).ways.values()] for op, build in CASES.items()
    }
    rows = 70_000 // 1024
    assert moved == {
        "reduce": [5 * 17_500 * 2] * 2,
        "fill-normal": [rows * 1024 * 2] * 2,
        "fill-uniform": [rows * 1024 * 2] * 2,
    }


def test_wrong_sums_are_noticed() -> None:
    slots = torch.randn(4, 1000, dtype=torch.float64).float()
    right = slots.sum(0)
    assert sum_problem(right, slots) == ""
    for place in (0, -1):
        for value in (right[place] + 1e-4 * right.abs().max(), torch.tensor(torch.nan)):
            wrong = right.clone()
            wrong[place] = value
            assert "relative error" in sum_problem(wrong, slots)
    assert "relative error" in sum_problem(slots[:3].sum(0), slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wrong_random_numbers_are_noticed(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(100_000, generator=generator)
    uniform = torch.rand(100_000, generator=generator)
    for values, name, other in ((normal, "normal", "uniform"), (uniform, "uniform", "normal")):
        assert moments_problem(values.to(dtype), name) == ""
        for wrong in (values + 0.05, values * 1.05, values * 0):
            assert "expected" in moments_problem(wrong.to(dtype), name)
        assert "expected" in moments_problem(values.to(dtype), other)


# --- Rows ----------------------------------------------------------------------------------------


def test_a_floor_is_what_a_copy_takes_for_the_bytes(alone: None) -> None:
    case = CASES["reduce"](SMALL)
    rows = run_case(case, device="cpu", copied_bytes=1 << 20, rounds=3)
    assert [row.system for row in rows] == [OURS, TORCH]
    for row in rows:
        assert row.problem == "" and row.median_us is not None and row.min_us is not None
        assert row.median_us >= row.min_us > 0 and row.copy_gbps > 0
        assert row.floor_us == pytest.approx(row.moved_bytes / row.copy_gbps / 1e3)
        assert row.ratio_to_floor == pytest.approx(row.median_us / row.floor_us)
        assert row.speedup == pytest.approx((rows[1].median_us or 0) / row.median_us)
        assert (row.rounds, row.shape) == (3, {"W": 4, "N": 17_500})


def test_a_wrong_way_gets_no_time(alone: None) -> None:
    case = CASES["reduce"](SMALL)
    ways = case.ways | {OURS: dataclasses.replace(case.ways[OURS], problem=lambda: "it is off")}
    wrong, right = run_case(
        dataclasses.replace(case, ways=ways), device="cpu", copied_bytes=1 << 10, rounds=1
    )
    assert wrong.median_us is wrong.iqr_us is wrong.ratio_to_floor is wrong.speedup is None
    assert right.median_us is not None and right.speedup == 1.0
    assert OPS.cells(wrong)[4:8] == ["wrong", "-", "-", "-"]
    assert OPS.notes([wrong, right])[0] == "reduce of axonn_ext gets no time: it is off"


def test_noise_is_named() -> None:
    calm = OpRow(
        op="reduce", device="cpu", dtype="bf16", shape={"W": 1, "N": 1}, system=OURS, problem="",
        median_us=100.0, iqr_us=9.0, min_us=95.0, moved_bytes=10_000, copy_gbps=1.0, floor_us=10.0,
        ratio_to_floor=10.0, speedup=2.0, rounds=30, threads=1,
    )  # fmt: skip
    assert OPS.notes([calm]) == []
    (note,) = OPS.notes([calm, dataclasses.replace(calm, iqr_us=11.0, system=TORCH)])
    assert note.startswith("noisy (reduce of torch)")
    assert OPS.cells(calm) == ["reduce", "bf16", "W=1,N=1", "axonn_ext", "100.0", "9.0", "95.0",
                               "0.1", "1.0", "10.00", "2.00"]  # fmt: skip


# --- The command ---------------------------------------------------------------------------------


def test_the_command_shows_and_writes_each_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.json"
    options = ("--op", "fill-uniform", "reduce", "--json", str(path))
    assert main(["bench", "ops", *SMALL_OPTIONS, *options]) == 0
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    rows = [OpRow(**row) for row in content["rows"]]
    asked = [(op, system) for op in ("fill-uniform", "reduce") for system in (OURS, TORCH)]
    assert [(row.op, row.system) for row in rows] == asked
    head, *lines = capsys.readouterr().out.splitlines()
    assert "copy GB/s" in head and "vs torch" in head
    assert [(line.split()[0], line.split()[3]) for line in lines[:4]] == asked


def test_what_was_known_before_a_failure_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(sizes: Sizes) -> OpCase:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(CASES, "fill-normal", fails)
    path = tmp_path / "ops.json"
    options = ["--op", "reduce", "fill-normal", "--json", str(path)]
    assert main(["bench", "ops", *SMALL_OPTIONS, *options]) == 1
    assert [row["op"] for row in json.loads(path.read_text())["rows"]] == ["reduce", "reduce"]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--op", "sort"], ["invalid choice: 'sort'"]),
        (["--slots", "257"], ["--slots", "<= 256, got 257"]),
        (["--elements", "0"], ["--elements", ">= 1, got 0"]),
        (["--elements", "1e12"], ["--elements 1000000000000 needs at least"]),
        (["--json", "/no/such/folder/x.json"], ["no folder /no/such/folder"]),
        (["more"], ["unknown argument more"]),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], messages: list[str]
) -> None:
    assert main(["bench", "ops", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
