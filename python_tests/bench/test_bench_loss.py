"""`axonn-ext bench loss`: its rows, memory measurements and errors, and wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from axonn_ext import GridShape
from axonn_ext.bench import loss as systems
from axonn_ext.bench.loss import (
    GOLDFISH,
    LOSS,
    OURS,
    OURS_IN_PLACE,
    SYSTEMS,
    TORCH,
    Batch,
    Case,
    LossRow,
    peak_bytes,
    run_case,
    worst_error,
)
from commands import AXONN, run
from grids import grid_of

pytestmark = pytest.mark.long

PNG = b"\x89PNG\r\n\x1a\n"
ROWS, VOCAB = 24, 4001


def rows_of(dtype: str, broken: str = "") -> list[LossRow]:
    """The rows. broken: "one" or "NaN" corrupts an element of the in-place system's gradient."""
    bind = systems.bind

    def broken_bind(system: str, batch: Batch, grid: object) -> object:
        call = bind(system, batch, grid)

        def wrong() -> systems.Outputs:
            loss, gradient = call()
            if system == OURS_IN_PLACE and broken:
                gradient[3, 7] += torch.nan if broken == "NaN" else 1.0
            return loss, gradient

        return wrong

    with mock.patch("axonn_ext.bench.loss.bind", broken_bind):
        return run_case(Case(ROWS, VOCAB, dtype, "cpu"), grid_of(GridShape()), rounds=2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_rows(pool, dtype):
    (rows,) = pool(1).run(rows_of, dtype)
    logits = ROWS * VOCAB * {"fp32": 4, "bf16": 2, "fp64": 8}[dtype]
    assert [row.system for row in rows] == list(SYSTEMS)
    for row in rows:
        assert row.correct and row.rel_error <= row.error_limit
        assert row.floor_us == 1.5 * row.copy_us > 0
        assert row.ratio_to_floor == row.median_us / row.floor_us
        assert row.speedup == rows[0].median_us / row.median_us
        assert row.peak_over_logits == row.peak_bytes / logits
    peaks = {row.system: row.peak_bytes for row in rows}
    rows_only = 64 * ROWS + 4096  # a few numbers per row, and scalars
    assert max(peaks[OURS_IN_PLACE], peaks[GOLDFISH]) <= rows_only
    assert logits <= peaks[OURS] <= logits + rows_only
    # Log-probabilities and a gradient, in fp32 or fp64; for low precision, also the copy.
    copies = {"fp32": 2 * 4, "fp64": 2 * 8, "bf16": 2 * 4 + 2}[dtype]
    assert peaks[TORCH] >= ROWS * VOCAB * copies


@pytest.mark.parametrize("broken", ["one", "NaN"])
def test_a_wrong_result_gets_no_time(pool, broken):
    (rows,) = pool(1).run(rows_of, "fp32", broken)
    wrong = {row.system: row for row in rows}[OURS_IN_PLACE]
    assert not wrong.correct and wrong.median_us is wrong.speedup is None
    assert (wrong.rel_error is None) == (broken == "NaN")
    assert "axonn_ext-in-place gets no time: its relative error" in LOSS.notes(rows)[0]
    assert all(row.correct and row.median_us for row in rows if row is not wrong)


def test_the_error_is_of_the_loss_and_of_the_gradient():
    batch = Batch.draw(10, 33, torch.float64, "cpu")
    leaf = batch.logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, batch.labels)
    (gradient,) = torch.autograd.grad(loss, leaf)
    with mock.patch.object(systems, "BLOCK_ELEMENTS", 4 * 33):  # 4 rows at once, then 2
        assert worst_error((loss.detach(), gradient), batch) < 1e-14
        assert worst_error((loss.detach() * 1.01, gradient), batch) == pytest.approx(0.01)
        changed = gradient.clone()
        changed[9, 32] += gradient.abs().max() / 100
        assert worst_error((loss.detach(), changed), batch) == pytest.approx(0.01)


def test_the_error_with_goldfish_is_of_the_labels_that_are_left():
    batch = Batch.draw(200, 33, torch.float64, "cpu")
    left = batch.goldfish()
    kept = left.labels != -100
    assert 20 < int((~kept).sum()) < 80 and torch.equal(left.labels[kept], batch.labels[kept])
    leaf = batch.logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, left.labels)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert worst_error((loss.detach(), gradient), left) < 1e-14
    assert worst_error((loss.detach(), gradient), batch) > 0.1
    gradient[(~kept).nonzero()[0], 0] = gradient.abs().max() / 100  # for a dropped label
    assert worst_error((loss.detach(), gradient), left) == pytest.approx(0.01)


def test_peak_bytes_are_those_held_at_once():
    def call() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(5000, dtype=torch.uint8)
        del first
        third = torch.empty(500, dtype=torch.uint8)
        del second, third

    assert peak_bytes(call, "cpu") == 6000


def test_the_command(tmp_path: Path):
    result = run(
        [*AXONN, "bench", "loss", "--rows", "8", "--vocab", "100", "1000", "100", "--rounds", "2",
         "--device", "cpu", "--json", str(tmp_path / "loss.json"),
         "--plot", str(tmp_path / "loss.png")]
    )  # fmt: skip
    assert result.status == 0, result.output
    content = json.loads((tmp_path / "loss.json").read_text())
    assert [(r["vocab"], r["system"]) for r in content["rows"]] == [
        (vocab, system) for vocab in (100, 1000) for system in SYSTEMS
    ]
    assert all(LossRow(**row).correct for row in content["rows"])
    assert content["machine"]["threads_per_rank"] == 1
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert "loss  rows, vocabulary = 8, 1000  bf16, 1 thread" in result.output
    assert str(tmp_path / "loss.png") in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows: expected a whole number >= 1"),
        (["--rows", "1000000", "--vocab", "1000000"], "GB of memory, but this machine has"),
        (["--plot", "loss.txt"], "--plot: expected a name ending in .png, .svg or .pdf"),
        (["--baseline", "x"], "--baseline"),
    ],
)
def test_what_is_refused(arguments, message):
    result = run([*AXONN, "bench", "loss", *arguments])
    assert result.status == 2 and message in result.output
