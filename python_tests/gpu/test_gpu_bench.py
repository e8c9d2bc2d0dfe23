"""The benchmarks on one GPU: their results are correct, and no row is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from axonn_ext.bench.launched import from_plain
from axonn_ext.bench.ops_cases import CASES, OURS, TORCH
from axonn_ext.bench.train.plan import Row
from axonn_ext.kernels import extension
from commands import AXONN, run
from slot_cases import DTYPES, SHAPES, make_slots, sums_in_order

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_added_as_on_cpus(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        slots = make_slots(shape, dtype)
        got = torch.ops.axonn._reduce_slots(slots.cuda())
        assert torch.equal(got.cpu(), sums_in_order(slots)), shape
    with pytest.raises(ValueError, match="there must be 1 to 256 slots, got 257"):
        torch.ops.axonn._reduce_slots(torch.ones(257, 2, device="cuda"))


def test_ops(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    done = run(
        [*AXONN, "bench", "ops", "--device", "cuda", "--elements", "40000", "--slots", "3",
         "--rounds", "1", "--json", str(path)],
    )  # fmt: skip
    assert done.status == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["system"]) for row in rows] == [
        (op, system) for op in CASES for system in (OURS, TORCH)
    ]
    assert all(row["device"] == "cuda" and row["median_us"] > 0 for row in rows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_on_one_gpu(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "train.json"
    done = run(
        [*AXONN, "bench", "train", "--device", "cuda", "--nproc", "1", "--hidden", "64", "--layers",
         "2", "--heads", "4", "--sequence", "16", "--batch", "4", "--vocabulary", "64", "--rounds",
         "1", "--dtype", dtype, "--baseline", "ddp", "--baseline", "fsdp2", "--json", str(path)],
    )  # fmt: skip
    assert done.status == 0, done.output
    rows = from_plain(list[Row], json.loads(path.read_text())["rows"])
    assert [row.system for row in rows] == ["single", "ddp", "fsdp2", "ours x=1"]
    matrices = 2 * 12 * 64**2
    for row in rows:
        assert row.problem is None and (row.device, row.dtype) == ("cuda", dtype)
        assert row.tokens_per_s is not None and row.tflops is not None and row.tflops > 0
        # Masters, two moments, and a gradient of at least two bytes.
        assert row.memory is not None and row.memory.peak_bytes > 14 * matrices, row
        assert row.peak_fraction is None or row.peak_fraction > 0


def test_tiles(tmp_path: Path) -> None:
    if extension.cuda is None or extension.cuda.gemm_source(0) != "cutlass":
        pytest.skip("the kernels for sm_90 are not here")
    path = tmp_path / "tiles.json"
    shape = ["--shapes", "264,200,136", "--layouts", "tn", "nt"]
    done = run([*AXONN, "bench", "gemm", "--tiles", "all", *shape, "--json", str(path)])
    assert done.status == 0, done.output
    content = json.loads(path.read_text())
    tiles = [f"{m}x{n}" for (m, n, _), _, _ in extension.cuda.gemm_candidates_sm90()]
    found = [(row["layout"], row["kernel"]) for row in content["rows"]]
    assert found == [(layout, k) for layout in ("tn", "nt") for k in ("torch.mm", *tiles)]
    assert sum(row["chosen"] for row in content["rows"]) == 2
    assert content["summary"][0]["num_products"] == 2
    done = run([*AXONN, "bench", "gemm", "--tiles", "96x96", *shape])
    assert done.status == 2 and f"expected some of {', '.join(tiles)}" in done.output
