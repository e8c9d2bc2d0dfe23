"""`axonn-ext bench optimizer`: its rows, bytes and errors, and systems whose bits differ."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from axonn_ext.bench import optimizer_systems as systems
from axonn_ext.bench.optimizer import OPTIMIZER, OptimizerRow, run_case
from axonn_ext.bench.optimizer_systems import CPU, DEVICE, DISK, SYSTEMS, TORCH, Case, System
from commands import AXONN, run

pytestmark = pytest.mark.long

PNG = b"\x89PNG\r\n\x1a\n"
ELEMENTS, BUCKET = 50_001, 9_000


def rows_of(
    folder: str, dtype: str, broken: str = "", elements: int = ELEMENTS
) -> list[OptimizerRow]:
    """The rows. broken: "one bit" or "NaN" corrupts a weight of the system CPU at the end."""
    build = systems.build

    def broken_build(name: str, case: Case, gradients: list[torch.Tensor]) -> System:
        system = build(name, case, gradients)
        if name != CPU or not broken:
            return system

        def weights() -> list[torch.Tensor]:
            first, *others = (weight.clone() for weight in system.weights())
            if broken == "NaN":
                first[3, 7] = torch.nan
            else:
                first.view(torch.int16)[3, 7] ^= 1
            return [first, *others]

        return dataclasses.replace(system, weights=weights)

    with mock.patch("axonn_ext.bench.optimizer.build", broken_build):
        return run_case(Case(elements, dtype, "cpu", BUCKET, Path(folder)), rounds=2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rows(pool, tmp_path, dtype):
    (rows,) = pool(1).run(rows_of, str(tmp_path), dtype)
    width = 4 if dtype == "fp32" else 2
    state = ELEMENTS + 16 * 64  # parts of a bucket begin at multiples of 64 elements
    assert [row.system for row in rows] == list(SYSTEMS)
    assert list(tmp_path.iterdir()) == []
    moved = {TORCH: 28, DEVICE: 28, CPU: 2 * width + 24, DISK: 2 * width + 24}
    for row in rows:
        assert row.correct and row.median_us > 0
        assert row.elements_per_ns == pytest.approx(ELEMENTS / (row.median_us * 1e3))
        assert row.moved_bytes == moved[row.system] * ELEMENTS
        assert row.floor_us == pytest.approx(row.pass_us * moved[row.system] / 8)
        assert row.ratio_to_floor == row.median_us / row.floor_us
    by = {row.system: row for row in rows}
    assert by[TORCH].vs_torch == 1
    assert by[TORCH].device_bytes == 16 * ELEMENTS
    assert by[DEVICE].device_bytes == (2 * width + (8 if dtype == "fp32" else 12)) * ELEMENTS
    assert by[DISK].device_bytes == 2 * width * ELEMENTS
    assert 12 * ELEMENTS <= by[DISK].disk_bytes <= 12 * state
    assert by[CPU].device_bytes == by[DISK].device_bytes + by[DISK].disk_bytes
    assert all(row.disk_bytes == row.host_bytes == 0 for row in rows if row.system != DISK)


@pytest.mark.parametrize("broken", ["one bit", "NaN"])
def test_other_bits_get_no_time(pool, tmp_path, broken):
    (rows,) = pool(1).run(rows_of, str(tmp_path), "bf16", broken)
    wrong = {row.system: row for row in rows}[CPU]
    assert not wrong.correct and wrong.median_us is wrong.vs_torch is wrong.ratio_to_floor is None
    assert "cpu gets no time: after a few steps" in OPTIMIZER.notes(rows)[0]
    assert all(row.correct and row.median_us for row in rows if row is not wrong)


@pytest.mark.parametrize("elements", [1, 3, 4, 5, 1023, 1024, 50_001, 64_000_000])
def test_shapes_have_all_elements(elements):
    shapes = systems.shapes_of(elements)
    assert sum(math.prod(shape) for shape in shapes) == elements
    assert all(math.prod(shape) for shape in shapes)
    if elements > 1024:
        assert {len(shape) for shape in shapes} == {1, 2}
        vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
        assert vectors <= elements // 1024 + 5 * math.isqrt(elements)


def test_one_element(pool, tmp_path):
    (rows,) = pool(1).run(rows_of, str(tmp_path), "bf16", "", 1)
    assert all(row.correct for row in rows)


def test_torch_updates_what_is_described():
    """The baseline matches AdamW in float64 up to rounding, with weight decay only for matrices."""
    case = Case(5_000, "bf16", "cpu", BUCKET, Path())
    gradients = systems.drawn(case, seed=1)
    system = systems.build(TORCH, case, gradients)
    system.take()
    system.step()
    for start, gradient, after in zip(
        systems.drawn(case, seed=0), gradients, system.weights(), strict=True
    ):
        wide, decay = gradient.double(), systems.DECAY if gradient.dim() == 2 else 0.0
        # After one step, the moments without their bias are the gradient and its square.
        want = start.double() * (1 - systems.LR * decay)
        want -= systems.LR * wide / (wide.abs() + systems.EPS)
        # The weight is rounded to bf16, whose significand has 8 bits.
        assert ((after.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()
        assert not torch.equal(after, start)


def test_the_command(tmp_path: Path):
    result = run(
        [*AXONN, "bench", "optimizer", "--elements", "20000", "--rounds", "2", "--device", "cpu",
         "--bucket", "7000", "--folder", str(tmp_path), "--json", str(tmp_path / "o.json"),
         "--plot", str(tmp_path / "o.png")]
    )  # fmt: skip
    assert result.status == 0, result.output
    content = json.loads((tmp_path / "o.json").read_text())
    rows = [OptimizerRow(**row) for row in content["rows"]]
    assert [(row.system, row.correct, row.bucket_elements) for row in rows] == [
        (system, True, 7000) for system in SYSTEMS
    ]
    assert content["machine"]["threads_per_rank"] == 1
    assert (tmp_path / "o.png").read_bytes().startswith(PNG)
    assert "optimizer  20,000 elements  bf16, 1 thread" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elements", "0"], "--elements: expected a whole number >= 1"),
        (["--dtype", "fp64"], "--dtype: invalid choice: 'fp64'"),
        (["--elements", "1e12"], "GB of memory, but this machine has"),
        (["--folder", "none"], "--folder: expected a folder that can be written, got none"),
        (["--plot", "loss.txt"], "--plot: expected a name ending in .png, .svg or .pdf"),
        (["--baseline", "x"], "--baseline"),
    ],
)
def test_what_is_refused(arguments, message):
    result = run([*AXONN, "bench", "optimizer", "--device", "cpu", *arguments])
    assert result.status == 2 and message in result.output
