"""Interrupted benchmarks keep their rows so far."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_ext.bench import fused_gemm, link_overlap
from axonn_ext.bench.fused_gemm import GemmRow
from axonn_ext.bench.link_overlap import LinkRow
from axonn_ext.cli import main
from commands import AXONN, processes_with, start, torchrun, wait_until
from pretend_gpus import pretend_gpus

SHAPES = ["64,64,64", "128,64,64", "64,128,64", "64,64,128"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["axonn-ext", "torchrun"])
def test_ops_that_are_cut_short(tmp_path: Path, launcher: str) -> None:
    path, output = tmp_path / "rows.json", tmp_path / "output"
    command = [*(AXONN if launcher == "axonn-ext" else torchrun(2)), "bench", "gemm-ops"]
    options = ["--grid", "x=2", "--shapes", *SHAPES, "--device", "cpu", "--rounds", "2"]
    job = start([*command, *options, "--json", str(path)], output=output)
    try:
        wait_until(lambda: has_rows(path), "the first rows")
        assert json.loads(path.read_text())["rows"], "whole from the first row on"
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=300)
    wait_until(lambda: not processes_with(str(path)), "the end of all processes")
    content = json.loads(path.read_text())
    rows = content["rows"]
    cases = list(dict.fromkeys((row["op"], tuple(row["shape"].values())) for row in rows))
    assert cases == [("ag-gemm", shape) for shape in shapes()[: len(cases)]]
    assert len(rows) == 4 * len(cases) and len(cases) < 3 * len(SHAPES)
    assert content["machine"]["cpu"] and content["summary"][0]["num_cases"] == len(cases)
    printed = output.read_text()
    assert printed.count("compute alone ") >= len(cases), "shown as they came, too"


def has_rows(path: Path) -> bool:
    """Whether the file has rows; at its start, the command only creates it, empty."""
    return path.exists() and path.stat().st_size > 0


def shapes() -> list[tuple[int, ...]]:
    return [tuple(map(int, text.split(","))) for text in SHAPES]


@pytest.mark.long
def test_rows_of_several_grids_are_one_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert main(["bench", "gemm-rs", "--grid", "x=2", "--grid", "x=1", "--shapes", "64,64,64",
                 "--device", "cpu", "--rounds", "2", "--json", str(path)]) == 0  # fmt: skip
    content = json.loads(path.read_text())
    assert [row["grid"]["x"] for row in content["rows"]] == [2] * 4 + [1] * 4
    printed = capfd.readouterr().out
    assert printed.count("gemm-rs  x=2") == printed.count("gemm-rs  x=1") == 1
    assert printed.count("us of one call on the slowest rank") == 1
    assert printed.rstrip().endswith(f"written: {path}")


def gemm_row(m: int, n: int, k: int, dtype: str, layout: str) -> GemmRow:
    shape = {"M": m, "N": n, "K": k}
    return GemmRow("gemm", shape, dtype, layout, 10.0, 11.0, 12.0, 1.1, 12 / 11, 0.0)


def link_rows(m: int, n: int, k: int, chunks: Any) -> list[LinkRow]:
    shape = {"M": m, "N": n, "K": k}
    return [
        LinkRow(
            "link-overlap", "a link", shape, "bf16", name, 3, 9.0, 5.0, 14.0, 10.0, 50.0, 0.8, 0.0
        )
        for name in ("chunked", "fused")
    ]


@pytest.mark.parametrize(
    ("module", "measure", "row", "arguments", "num_rows"),
    [
        (fused_gemm, "measure_gemm", gemm_row, ["gemm", "--shapes", "2048,8,8", "4096,8,8"], 5),
        (link_overlap, "measure_link", link_rows,
         ["link-overlap", "--shape", *(f"{m},8,8" for m in (8, 16, 24, 32, 40, 48))], 10),
    ],
    ids=["gemm", "link-overlap"],
)  # fmt: skip
def test_a_gpu_benchmark_that_fails_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    module: Any, measure: str, row: Callable[..., Any], arguments: list[str], num_rows: int,
) -> None:  # fmt: skip
    """The parts that need a GPU are faked; the sixth measurement fails."""
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(link_overlap, "describe_machine", lambda **given: {"gpu": "none"})
    asked = []

    def measured(*given: Any) -> Any:
        asked.append(given)
        if len(asked) > 5:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return row(*given)

    monkeypatch.setattr(module, measure, measured)
    path = tmp_path / "rows.json"
    args = ["bench", *arguments, "--json", str(path)]
    assert main(args) == 1
    content = json.loads(path.read_text())
    assert len(content["rows"]) == num_rows and content["machine"] == {"gpu": "none"}
    assert len(content["summary"]) == (1 if measure == "measure_gemm" else 5)
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if "2048,8,8" in line or "chunked " in line]) in (3, 5)
