"""The published shapes, torch's symmetric memory as a baseline, and the summary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape
from axonn_ext.bench import command, symm_mem
from axonn_ext.bench.case import Spec
from axonn_ext.bench.fused_gemm import GemmRow, summarize
from axonn_ext.bench.fused_gemm import parse_shapes as parse_gemm_shapes
from axonn_ext.bench.link_overlap import LinkRow
from axonn_ext.bench.link_overlap import summarize as summarize_links
from axonn_ext.bench.reference import judge
from axonn_ext.bench.report import plot_rows
from axonn_ext.bench.results import compare, content_of
from axonn_ext.bench.run import Plan, build_case
from axonn_ext.calibrate.measure import Ranks
from axonn_ext.calibrate.shapes import (
    GEMM_OPS,
    PUBLISHED_LAYERS,
    PUBLISHED_ROWS,
    GemmShape,
    parse_shapes,
    problems,
)
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.rows import RowsFile
from bench_rows import row_of
from grids import grid_of

# --- Shapes ---------------------------------------------------------------------------------------


def test_the_published_shapes_and_some_of_them() -> None:
    gathered, reduced = (
        parse_shapes("ag-gemm", ["published"]),
        parse_shapes("gemm-rs", ["published"]),
    )
    assert len(gathered) == len(PUBLISHED_LAYERS) * len(PUBLISHED_ROWS) == len(set(gathered))
    assert [(m, k, n) for m, n, k in gathered] == list(reduced), "transposed"
    assert parse_shapes("gemm-ar", ["published"]) == reduced
    assert parse_shapes("linear", ["published"], role="contract") == reduced
    assert (min(s.M for s in gathered), max(s.M for s in gathered)) == (64, 16384)
    some = parse_shapes("ag-gemm", ["published:1024,64", "8,8,8"])
    assert some == (*(s for s in gathered if s.M in (64, 1024)), GemmShape(8, 8, 8))
    for text, message in (
        ("published:65", "published has M of 64, 256, 1024, 2048, 4096, 8192, 16384, got '65'"),
        ("published:", "got ''"),
        ("publisher", "one of llama-70b, gpt3, published, got 'publisher'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_shapes("ag-gemm", [text])
    with pytest.raises(UserError, match="batch,sequence,hidden,heads"):
        parse_shapes("block", ["published"])


@pytest.mark.parametrize("op", GEMM_OPS)
def test_groups_of_2_to_16_divide_the_published_shapes(op: str) -> None:
    for ranks in (2, 4, 8, 16):
        grid = GridShape(x=ranks)
        for shape in parse_shapes(op, ["published"]):
            assert problems(op, shape, grid, role="expand", layout="sharded") == []


def plan_of(*arguments: str) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(arguments)
    return command.make_plan(args, None), args


def test_one_command_times_the_three_ops() -> None:
    plan, args = plan_of("gemm-ops", "--device", "cpu", "--world", "4", "--shapes", "published:64")
    assert [spec.op for spec in plan.specs] == [op for op in GEMM_OPS for _ in PUBLISHED_LAYERS]
    for op in GEMM_OPS:
        shapes = tuple(spec.shape for spec in plan.specs if spec.op == op)
        assert shapes == parse_shapes(op, ["published:64"])
    # Its workers get the same plan.
    again, _ = plan_of(*command._worker_arguments(args, plan.grids[0])[1:])
    assert again == plan


def test_shapes_of_the_kernels_benchmark() -> None:
    assert parse_gemm_shapes("published:2048") == parse_shapes("ag-gemm", ["published:2048"])
    assert parse_gemm_shapes("8,16,24") == ((8, 16, 24),)


# --- The baseline ---------------------------------------------------------------------------------


def test_where_the_baseline_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(op: str = "ag-gemm", ranks: int = 4, dtype: str = "bf16", device: str = "cuda"):
        return symm_mem.why_refused(op, GridShape(x=ranks), dtype=dtype, device=device)

    assert refused(device="cpu") == (
        "torch.ops.symm_mem has kernels only for GPUs, got --device cpu"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert refused() == refused("gemm-rs", dtype="fp16") == refused("gemm-ar") == ""
    assert refused(ranks=1) == "it needs two ranks or more, got 1"
    assert "a GPU for each rank, got 4 for 8 ranks" in refused(ranks=8)
    assert refused("gemm-ar", dtype="fp16") == "its all-reduce adds fp32 and bf16, got fp16"
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda own, peer: {own, peer} != {1, 2}
    )
    symm_mem.require_peer_access(2)
    with pytest.raises(UserError, match="reach each other's memory, which GPU 1 and GPU 2 do not"):
        symm_mem.require_peer_access(4)


def test_the_command_refuses_it_by_name() -> None:
    with pytest.raises(UserError, match=r"--baseline torch-symm-mem: .* got --device cpu"):
        plan_of("gemm-ops", "--device", "cpu", "--baseline", "torch-symm-mem")
    with pytest.raises(SystemExit):
        plan_of("linear", "--baseline", "torch-symm-mem")


def shapes_of_the_baseline() -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The results of torch's own shape functions for the calls, with operands as in `gemm_case`."""
    grid = grid_of(GridShape(x=2))
    axis: AxisGroup = grid.axis("x")
    found = []
    for op, a, b in (("ag-gemm", (3, 8), (8, 5)), ("gemm-rs", (6, 4), (4, 5))):
        operands = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (a, b))
        result = symm_mem.bind_symm_mem(op, *operands, axis)()
        found.append((tuple(result.shape), result.dtype))
    return found


def test_the_baselines_calls_fit_torchs_schemas(pool) -> None:
    expected = [((6, 5), torch.bfloat16), ((3, 5), torch.bfloat16)]
    assert pool(2).run(shapes_of_the_baseline) == [expected] * 2


def judge_the_baseline(dtype: str) -> list[str]:
    wrong = []
    for op in GEMM_OPS:
        if op == "gemm-ar" and dtype not in symm_mem.ALL_REDUCE_DTYPES:
            continue
        for shape in (GemmShape(512, 768, 1024), GemmShape(4096, 512, 256)):
            grid = GridShape(x=dist.get_world_size())
            case = build_case(
                Spec(op, shape, grid, dtype, (symm_mem.NAME,), device="cuda"), grid_of(grid)
            )
            for _ in range(3):
                verdict = judge(case.algorithms[symm_mem.NAME](), case.expected, Ranks())
                if not verdict.correct:
                    wrong.append(f"{op} {shape}: {verdict}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_baseline_is_right(gpu_pool, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("torch's symmetric memory between ranks needs two GPUs")
    assert gpu_pool(2).run(judge_the_baseline, dtype) == [[], []]


# --- The summary ----------------------------------------------------------------------------------


ROWS = [
    row_of(op, m, algorithm, us)
    for op, m, times in (
        ("ag-gemm", 64, {"sequential": 10.0, "auto": 10.1, symm_mem.NAME: 20.2}),
        ("ag-gemm", 128, {"sequential": 20.0, "auto": 10.0}),
        ("gemm-rs", 64, {"sequential": 10.0, "auto": 10.4}),
        ("gemm-rs", 128, {"sequential": 10.0, "auto": None}),
        ("gemm-rs", 256, {"auto": 30.0}),
    )
    for algorithm, us in times.items()
]


def test_auto_is_compared_over_all_shapes(tmp_path: Path) -> None:
    gathered, beside_torch, reduced = compare(ROWS)
    assert (gathered.op, gathered.against, gathered.num_cases) == ("ag-gemm", "sequential", 2)
    assert gathered.worst_ratio == pytest.approx(1.01) and gathered.slower == ()
    assert gathered.worst_case == "M,N,K = 64,8,8 on x=2"
    assert gathered.worst_spread == pytest.approx(0.05)
    assert gathered.mean_speedup == pytest.approx(math.sqrt(2 / 1.01))
    assert "never slower by more than 2%" in gathered.sentence()
    assert (beside_torch.against, beside_torch.num_cases) == (symm_mem.NAME, 1)
    assert beside_torch.mean_speedup == pytest.approx(2.0)
    assert reduced.num_cases == 1, "the wrong one and the one without a pair do not count"
    assert reduced.slower == ("M,N,K = 64,8,8 on x=2",)
    assert "slower by more than 2% in 1: M,N,K = 64,8,8 on x=2" in reduced.sentence()
    assert compare([row for row in ROWS if row.algorithm != "auto"]) == []
    RowsFile("--json", tmp_path / "a.json").write(content_of({}, ROWS, [gathered]))
    assert json.loads((tmp_path / "a.json").read_text())["summary"] == [
        dataclasses.asdict(gathered) | {"slower": []}
    ]


def test_many_shapes_are_drawn_in_panels(tmp_path: Path) -> None:
    sizes = []
    for num_shapes in (5, 10):
        rows = [row_of(op, m, "auto", 2.0) for op in GEMM_OPS for m in range(1, num_shapes + 1)]
        plot_rows(rows, "a machine", tmp_path / "chart.png")
        sizes.append(struct.unpack(">II", (tmp_path / "chart.png").read_bytes()[16:24]))
    (wide, low), (as_wide, high) = sizes
    assert as_wide == wide and high > 1.3 * low, "30 shapes are one row of 14 more than 15"


def test_the_kernels_least_speeds() -> None:
    def row(m: int, fused: float, waiting: float) -> GemmRow:
        shape = {"M": m, "N": 8, "K": 8}
        return GemmRow("gemm", shape, "bf16", "nn", 100.0, 100 * fused, 100 * fused * waiting,
                       fused, waiting, 0.0)  # fmt: skip

    (summary,) = summarize([row(64, 9.0, 9.0), row(2048, 1.02, 1.001), row(4096, 1.01, 1.005)])
    assert summary.num_products == 2
    assert summary.least_of_torch == pytest.approx(1 / 1.02)
    assert summary.least_of_fused == pytest.approx(1 / 1.005)
    assert "0.980 of the speed of torch.mm (aim: 0.97)" in summary.sentence()
    assert summarize([row(64, 1.0, 1.0)]) == []


def test_the_emulated_links_summary() -> None:
    def row(n: int, algorithm: str, overlapped_us: float) -> LinkRow:
        return LinkRow(
            "link-overlap", "", {"M": 8, "N": n, "K": 8}, "bf16", algorithm, 3, gemm_us=100.0,
            copy_us=46.0, sequential_us=150.0, overlapped_us=overlapped_us, link_gbps=50.0,
            overlap_efficiency=(146 - overlapped_us) / 46, max_difference=0.0,
        )  # fmt: skip

    rows = [row(8, "chunked", 125.0), row(8, "chunked", 120.0), row(8, "fused", 100.0)]
    (found,) = summarize_links([*rows, row(16, "chunked", 90.0)])
    assert found.shape == {"M": 8, "N": 8, "K": 8} and found.copy_over_gemm == 0.46
    assert found.speedup_over_chunked == 1.2 and found.speedup_over_sequential == 1.5
    assert "8,8,8, copy / matmul 0.46: fused overlaps 100.0% (aim: 90%)" in found.sentence()


def test_the_command_ends_with_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    _, args = plan_of("gemm-ops", "--device", "cpu", "--json", str(path))
    command._Cases(args).add(ROWS)
    command._report(args, ROWS)
    lines = capsys.readouterr().out.splitlines()
    expected = [comparison.sentence() for comparison in compare(ROWS)]
    assert [line for line in lines if "auto takes at most" in line] == expected
    content = json.loads(path.read_text())
    assert [line["against"] for line in content["summary"]] == [
        "sequential", symm_mem.NAME, "sequential"
    ]  # fmt: skip
