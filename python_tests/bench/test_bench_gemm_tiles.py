"""`axonn-ext bench gemm --tiles`: its choice of tiles, rows and summary."""

from __future__ import annotations

import argparse

import pytest
from rich.console import Console

from axonn_ext.bench import fused_gemm
from axonn_ext.bench.gemm_tiles import (
    COLUMNS,
    TILE_ROWS,
    TORCH,
    TileRow,
    parse_tiles,
    row_of,
    summarize,
    tiles_of,
)
from axonn_ext.calibrate.measure import Timing
from axonn_ext.calibrate.shapes import PUBLISHED_LAYERS
from axonn_ext.cli.main import Parser
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.rows import RowsTable

KNOWN = ("128x256", "128x128", "64x128")


def arguments(*options: str) -> argparse.Namespace:
    parser = Parser()
    fused_gemm.add_parser(parser.add_subparsers())
    return parser.parse_args(["gemm", *options])


def test_tiles_are_named_by_rows_and_columns() -> None:
    assert tiles_of(KNOWN, parse_tiles(["all"])) == KNOWN
    asked = parse_tiles(["64x128", "128x256", "64x128"])
    assert asked == ("64x128", "128x256")
    assert tiles_of(KNOWN, asked) == asked
    for text in ("128", "128x", "x256", "0x8", "128X256", "128x256x64", "-1x8", "99999x8", ""):
        with pytest.raises(UserError, match="expected all, or tiles by their rows and columns"):
            parse_tiles([text])
    with pytest.raises(UserError, match="some of 128x256, 128x128, 64x128, got 96x96"):
        tiles_of(KNOWN, parse_tiles(["128x256", "96x96"]))


def test_tiles_are_timed_in_the_published_layers() -> None:
    shapes = fused_gemm.shapes_of(arguments("--tiles", "all"))
    assert [min(TILE_ROWS), max(TILE_ROWS)] == [512, 16384]
    assert {(shape.N, shape.K) for shape in shapes} == set(PUBLISHED_LAYERS)
    assert len(shapes) == len(set(shapes)) == len(TILE_ROWS) * len(PUBLISHED_LAYERS)
    assert fused_gemm.shapes_of(arguments()) == list(fused_gemm.SHAPES)
    options = ("--tiles", "all", "--shapes", "8,16,24", "8,16,24")
    assert fused_gemm.shapes_of(arguments(*options)) == [(8, 16, 24)]


def product(m: int, chosen: str, times_us: dict[str, float]) -> list[TileRow]:
    """Rows whose modelled times are twice the measured ones."""
    timings = {name: Timing((t - 1, t, t + 3), 1, None) for name, t in times_us.items()}
    return [
        row_of(
            name, timings, shape={"M": m, "N": 1000, "K": 1000}, dtype="bf16", layout="tn",
            chosen=chosen, modelled_us=None if name == TORCH else 2 * t, max_difference=0.0,
        )
        for name, t in times_us.items()
    ]  # fmt: skip


def test_a_row_has_the_measured_and_the_modelled_time_apart() -> None:
    torch_row, chosen, other = product(
        500, "128x256", {TORCH: 100.0, "128x256": 80.0, "64x128": 120.0}
    )
    assert (torch_row.kernel, torch_row.chosen, torch_row.modelled_us) == (TORCH, False, None)
    assert (torch_row.median_us, torch_row.iqr_us, torch_row.over_torch) == (100.0, 2.0, 1.0)
    assert torch_row.tflops == pytest.approx(10.0)
    assert (chosen.chosen, chosen.over_torch, chosen.modelled_us) == (True, 0.8, 160.0)
    assert (other.chosen, other.over_torch) == (False, 1.2)


def test_the_table_names_the_modelled_column(capsys: pytest.CaptureFixture[str]) -> None:
    table = RowsTable(Console(width=200), COLUMNS)
    for row in product(500, "128x256", {TORCH: 100.0, "128x256": 80.0}):
        table.add(row.cells())
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "modelled us"
    assert lines[0].split() == ["500,1000,1000", "tn", "torch.mm", "100.0", "2.0", "10", "1.000",
                                "-"]  # fmt: skip
    assert lines[1].split()[2:4] == ["128x256", "(chosen)"]
    assert lines[1].split()[-1] == "160.0"


def test_the_summary_is_of_the_chosen_tiles() -> None:
    rows = [
        *product(8, "128x256", {TORCH: 100.0, "128x256": 80.0, "64x128": 120.0}),
        *product(16, "128x256", {TORCH: 100.0, "128x256": 125.0, "64x128": 100.0}),
    ]
    (found,) = summarize(rows)
    assert (found.num_products, found.num_slower) == (2, 1)
    assert found.worst_choice == 1.25 and found.worst_product == "16,1000,1000 tn"
    assert found.mean_over_torch == pytest.approx(1.0)
    assert "another one is faster in 1, at most by a factor of 1.250" in found.sentence()
    assert summarize(product(8, "128x128", {TORCH: 1.0, "64x128": 2.0})) == []
