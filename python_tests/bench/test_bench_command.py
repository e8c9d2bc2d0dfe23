"""The command `axonn-ext bench`: its arguments, errors, output and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from axonn_ext import GridShape, ops
from axonn_ext.bench.case import Spec
from axonn_ext.bench.command import BASELINES
from axonn_ext.bench.reference import judge
from axonn_ext.bench.run import build_case
from axonn_ext.calibrate.measure import Ranks
from axonn_ext.calibrate.shapes import (
    ALL_GEMM_OPS,
    OPS,
    BlockShape,
    GemmShape,
    parse_shapes,
    problems,
)
from axonn_ext.cli import main
from axonn_ext.terminal.errors import UserError
from commands import AXONN, ROOT, run, torchrun
from grids import grid_of

PNG = b"\x89PNG\r\n\x1a\n"


def test_shapes() -> None:
    assert parse_shapes("linear", []) == (GemmShape(M=512, N=1024, K=1024),)
    assert parse_shapes("ag-gemm", ["1,2,3", "4, 5, 6", "1,2,3"]) == (
        GemmShape(1, 2, 3), GemmShape(4, 5, 6)
    )  # fmt: skip
    assert parse_shapes("block", ["1,2,3,4"]) == (BlockShape(1, 2, 3, 4),)
    gathered, reduced = parse_shapes("ag-gemm", ["gpt3"]), parse_shapes("gemm-rs", ["gpt3"])
    assert all(shape.K == 12288 for shape in gathered)
    assert all(shape.N == 12288 for shape in reduced)
    assert parse_shapes("linear", ["llama-70b"], role="contract") == parse_shapes(
        "gemm-ar", ["llama-70b"]
    )
    for op, text, message in (
        ("linear", "1,2", "linear takes \"M,N,K\" or one of llama-70b, gpt3, published, got '1,2'"),
        ("linear", "1,2,0", "at least 1"),
        ("ag-gemm", "gpt2", "got 'gpt2'"),
        ("block", "llama-70b", 'block takes "batch,sequence,hidden,heads" or one of gpt2, gpt3'),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_shapes(op, [text])


@pytest.mark.parametrize("op", ["linear", "ag-gemm", "gemm-rs", "gemm-ar"])
def test_divisibility_is_exactly_what_runs(pool, op: str) -> None:
    shapes = [GemmShape(1, 8, 8), GemmShape(8, 1, 8), GemmShape(8, 8, 1), GemmShape(4, 2, 2)]
    grids, variants = ["x=4"], [{}]
    if op == "linear":
        grids = ["2x2x1", "1x2x2", "2x1x2", "1x1x4"]
        variants = [
            {"role": role, "layout": layout}
            for role in ("expand", "contract")
            for layout in ("sharded", "replicated")
        ]
    specs = [
        Spec(op, shape, GridShape.parse(grid), "fp32", ("sequential",), options)
        for shape in shapes for grid in grids for options in variants
    ]  # fmt: skip
    said = [
        bool(problems(op, s.shape, s.grid, role=s.options.get("role", "expand"),
                      layout=s.options.get("layout", "sharded")))
        for s in specs
    ]  # fmt: skip
    assert len(set(said)) == 2, "some must run and some must not"
    for raised in pool(4).run(try_all, specs):
        wrong = [spec for spec, a, b in zip(specs, said, raised, strict=True) if a != b]
        assert not wrong, wrong


def try_all(specs: list[Spec]) -> list[bool]:
    """For each spec, whether it cannot run, or runs with wrong results."""
    raised = []
    for spec in specs:
        try:
            case = build_case(spec, grid_of(spec.grid))
            verdict = judge(case.algorithms["sequential"](), case.expected, Ranks())
            raised.append(not verdict.correct)
        except ValueError:
            raised.append(True)
    return raised


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["linear", "--grid", "2x2"], ["grid must read like"]),
        (["linear", "--grid", "2x1x1", "--world", "2"], ["give one of them"]),
        (["linear", "--grid", "2x1x1", "--shapes", "3,5,4"], ["M must be", "N must be"]),
        (["linear", "--grid", "data=2"], ["data=2 must be 1"]),
        (["ag-gemm", "--grid", "1x2x1"], ["y and z must be 1"]),
        (["block", "--world", "3"], ["num_heads: 8", "divisible by 3"]),
        (["block", "--shapes", "2,8,30,4"], ["hidden_size=30"]),
        (["gemm-rs", "--algorithms", "fast"], ["'fast'", "sequential"]),
        (["gemm-rs", "--rounds", "0"], ["--rounds"]),
        (["gemm-rs", "--threads", "-1"], ["--threads"]),
        (["gemm-rs", "--json", "/no/such/folder/x.json"], ["no folder /no/such/folder"]),
        (["gemm-rs", "--plot", "chart.txt"], [".png, .svg or .pdf"]),
        (["gemm-rs", "more"], ["unknown argument more"]),
        (["gemm-rs", "--role", "expand"], ["unknown argument --role"]),
        (["link-overlap", "--shape", "1,2"], ["M,N,K", "'1,2'"]),
        (["link-overlap", "--shape", "6,8,8"], ["4 shards", "6"]),
        (["gemm", "--shapes", "8,8"], ["M,N,K", "'8,8'"]),
        (["gemm", "--shapes", "8,8,12"], ["multiples of 8", "'8,8,12'"]),
        (["gemm", "--shapes", "published:8"], ["published has M of", "got '8'"]),
        (["gemm", "--tiles", "128"], ["rows and columns, like 128x256", "got '128'"]),
        (["gemm", "--tiles", "128x256", "all"], ["like 128x256, got 'all'"]),
        (["ag-gemm", "--device", "cpu", "--baseline", "torch-symm-mem"], ["only for GPUs, got"]),
        (["ag-gemm", "--baseline", "nccl"], ["invalid choice: 'nccl'"]),
        (["link-overlap", "--chunks", "0"], ["--chunks", ">= 1, got 0"]),
        (["conv"], ["invalid choice: 'conv'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_are_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], messages: list[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments",
    [
        ["gemm-rs", "--device", "cuda"],
        ["link-overlap"],
        ["gemm"],
        ["gemm", "--tiles", "all"],
        ["train", "--device", "cuda"],
    ],
    ids=" ".join,
)
def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "sees no GPU" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], *(["bench", op] for op in (*OPS, ALL_GEMM_OPS))):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "examples:\n  axonn-ext bench" in text
        assert "--rows" not in text, "for the command's own processes"


@pytest.mark.slow
def test_command_on_two_grids(tmp_path: Path) -> None:
    done = run(
        [*AXONN, "bench", "linear", "--device", "cpu", "--grid", "2x1x1", "--grid", "1x2x1",
         "--shapes", "64,32,48", "--algorithms", "sequential,fused", "--rounds", "3",
         "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    )  # fmt: skip
    assert done.status == 0, done.output
    assert "Warning" not in done.output and "Traceback" not in done.output
    for text in ("linear  x=2  M,N,K = 64,32,48  fp32, expand, sharded", "linear  y=2", "fastest:"):
        assert done.output.count(text) >= 1, done.output
    content = json.loads((tmp_path / "a.json").read_text())
    machine, rows = content["machine"], content["rows"]
    assert machine["torch"] == torch.__version__ and machine["threads_per_rank"] == 1
    assert [(row["grid"]["x"], row["grid"]["y"], row["algorithm"]) for row in rows] == [
        (2, 1, "sequential"), (2, 1, "fused"), (1, 2, "sequential"), (1, 2, "fused")
    ]  # fmt: skip
    for row in rows:
        assert row["shape"] == {"M": 64, "N": 32, "K": 48}
        assert row["batches"] == 3 and row["threads"] == 1
        assert 0 < row["min_us"] <= row["median_us"]
        # A batch lasts 50 ms; half of that, as the median is of other batches than the last.
        assert row["calls_per_batch"] * row["median_us"] > 50e3 / 2
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.long
def test_command_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [*torchrun(2), "bench", "gemm-ar", "--device", "cpu", "--shapes", "8,8,8"]
    done = run([*command, "--rounds", "1", "--algorithms", "fused", "--json", str(path)])
    assert done.status == 0, done.output
    assert done.output.count("without sequential there is no speedup") == 1, done.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["speedup"] is None and row["hidden_share"] is None and row["ratio_to_floor"] > 0


# --- Documentation --------------------------------------------------------------------------------


def test_the_page_says_what_each_algorithm_is() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    timed = page.partition("In each run:")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([\w-]+)` \|", timed, re.MULTILINE))
    assert named == {*ops.ALGORITHMS, *BASELINES}
