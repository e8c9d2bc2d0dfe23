"""`axonn-ext plan --sweep` and `--series`: many jobs, each with its best configuration."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ("plan", "--model", "gpt2-small", "--machine", "dgx-a100")
BATCH = ("--global-batch", "64")
PNG = b"\x89PNG\r\n\x1a\n"


def planned(folder: Path, *arguments: str) -> Any:
    path = folder / "plan.json"
    assert main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("sweep", "gpus", "batches"),
    [
        ("gpus=2..8", [2, 4, 8], [64, 64, 64]),
        ("gpus=8,3,2", [8, 3, 2], [64, 64, 64]),
        ("weak=2..8", [2, 4, 8], [64, 128, 256]),
        ("weak=2,3", [2, 3], [64, 96]),
    ],
)
def test_sweeps_of_gpus(
    sweep: str, gpus: list[int], batches: list[int], tmp_path: Path, capsys: Capture
) -> None:
    picture = tmp_path / "scaling.png"
    content = planned(tmp_path, *SMALL, *BATCH, "--sweep", sweep, "--plot", str(picture))
    out, points = capsys.readouterr().out, content["points"]
    assert ("the batch grows with the GPUs" in out) == sweep.startswith("weak")
    assert content["sweep"] == sweep.partition("=")[0]
    assert [p["gpus"] for p in points] == gpus
    assert [p["global_batch"] for p in points] == batches
    speeds = [p["config"]["tokens_per_s"] / p["gpus"] for p in points]
    for p, speed in zip(points, speeds, strict=True):
        line = next(row for row in out.splitlines() if re.match(rf" *{p['gpus']} +\d", row))
        assert f"{speed / speeds[0]:.1%}" in line
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("kind", ["seq", "batch", "gpus", "weak"])
def test_every_point_is_the_plan_of_that_job_alone(kind: str, tmp_path: Path) -> None:
    values = {"seq": "256..512", "batch": "32..64"}.get(kind, "2..4")
    batch = () if kind == "batch" else BATCH
    gpus = ("--gpus", "4") if kind in ("seq", "batch") else ()
    points = planned(tmp_path, *SMALL, *batch, *gpus, "--sweep", f"{kind}={values}")["points"]
    alone = {
        "seq": (*BATCH, "--gpus", "4", "--seq", "512"),
        "batch": ("--global-batch", "64", "--gpus", "4"),
        "gpus": (*BATCH, "--gpus", "4"),
        "weak": ("--global-batch", "128", "--gpus", "4"),
    }[kind]
    expected = planned(tmp_path, *SMALL, *alone)["configs"][0]
    assert len(points) == 2 and points[1]["config"] == expected
    assert points[0]["config"] != expected


def test_a_batch_in_tokens_stays_the_same_over_sequence_lengths(tmp_path: Path) -> None:
    batch = ("--global-batch-tokens", "65536", "--gpus", "4")
    points = planned(tmp_path, *SMALL, *batch, "--sweep", "seq=256..1024")["points"]
    assert [(p["sequence_length"], p["global_batch"]) for p in points] == [
        (256, 256), (512, 128), (1024, 64),
    ]  # fmt: skip


def test_a_series_has_its_own_model_for_each_number_of_gpus(
    tmp_path: Path, capsys: Capture
) -> None:
    picture = tmp_path / "series.png"
    arguments = ["plan", "--machine", "dgx-a100", *BATCH, "--plot", str(picture)]
    arguments += ["--series", "2:gpt2-small,4:gpt2-medium"]
    content = planned(tmp_path, *arguments)
    out, points = capsys.readouterr().out, content["points"]
    assert [(p["gpus"], p["model"]) for p in points] == [(2, "gpt2-small"), (4, "gpt2-medium")]
    peaks = [p["config"]["peak_fraction"] for p in points]
    line = next(line for line in out.splitlines() if "gpt2-medium" in line)
    assert f"{peaks[1] / peaks[0]:.1%}" in line  # models differ, so tokens do not compare
    alone = ("plan", "--machine", "dgx-a100", *BATCH, "--gpus", "4", "--model", "gpt2-medium")
    assert points[1]["config"] == planned(tmp_path, *alone)["configs"][0]
    assert picture.read_bytes().startswith(PNG)


def test_where_nothing_fits_the_reason_is_told(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "plan.csv"
    arguments = ["plan", "--model", "gpt-5b", "--machine", "perlmutter", *BATCH]
    assert main([*arguments, "--sweep", "gpus=1..8", "--csv", str(table)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ *1 +64 +- *$", out, re.MULTILINE)
    assert re.search(r"gpt-5b .* cannot run on 1 GPU of perlmutter", out)
    rows = list(csv.DictReader(table.open()))
    assert "cannot run on 1 GPU" in rows[0]["problem"] and rows[0]["step_time_s"] == ""
    assert rows[-1]["problem"] == "" and float(rows[-1]["step_time_s"]) > 0


def test_more_gpus_than_the_machine_has_are_one_problem_among_points(
    tmp_path: Path, capsys: Capture
) -> None:
    known = Path(__file__).resolve().parents[2] / "axonn_ext/planner/machines/dgx-a100.toml"
    path = tmp_path / "lab.toml"
    path.write_text(known.read_text().replace('name = "cluster"', 'name = "cluster"\nranks = 16'))
    arguments = ["plan", "--model", "gpt2-small", "--machine", str(path), *BATCH]
    points = planned(tmp_path, *arguments, "--sweep", "gpus=8..32")["points"]
    assert [p["config"] is None for p in points] == [False, False, True]
    assert "has 16 GPUs, got num_ranks=32" in points[2]["problem"]


def test_a_table_has_what_the_json_has(tmp_path: Path) -> None:
    table = tmp_path / "plan.csv"
    arguments = (*SMALL, *BATCH, "--gpus", "8", "--price", "2.5", "--csv", str(table))
    configs = planned(tmp_path, *arguments)["configs"]
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == len(configs) > 1
    for row, config in zip(rows, configs, strict=True):
        assert (row["model"], row["gpus"], row["global_batch"]) == ("gpt2-small", "8", "64")
        assert float(row["step_time_s"]) == config["step_time_s"]
        assert int(row["grid.z"]) == config["grid"]["z"]
        assert float(row["exposed_s.data"]) == config["exposed_s"]["data"]
        assert int(row["memory_items.logits"]) == config["memory_items"]["logits"]
        assert config["cost"] == pytest.approx(2.5 * config["gpu_hours"])
        assert float(row["cost"]) == config["cost"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gpus", "8", "--sweep", "gpus=2..4"], ["--gpus is decided by --sweep gpus, got 8"]),
        (["--gpus", "8", "--sweep", "batch=2..4"], ["--global-batch is decided by --sweep batch"]),
        (["--sweep", "seq=256..512"], ["expected --gpus"]),
        (["--sweep", "gpus=4..2"], ["--sweep", "A..B", "'gpus=4..2'"]),
        (["--sweep", "weak=8..13"], ["--sweep", "A, 2 A, 4 A", "8..16", "'weak=8..13'"]),
        (["--sweep", "gpus=8..10"], ["--sweep", "such as 8..8"]),
        (["--sweep", "gpus=0..8"], ["--sweep", ">= 1", "got 0 in 'gpus=0..8'"]),
        (["--sweep", "gpus=4,4"], ["--sweep", "different numbers", "'gpus=4,4'"]),
        (["--sweep", "gpus=4,"], ["--sweep", "whole number", "'gpus=4,'"]),
        (["--sweep", "gpu=4..8"], ["--sweep", "gpus, weak, seq, batch", "'gpu=4..8'"]),
        (["--sweep", "weak=64,65", "--global-batch", "63"], ["grows to a whole one, got 65"]),
        (["--sweep", "gpus=2..4", "--explain", "1"], ["--explain", "--sweep gpus has several"]),
        (["--sweep", "gpus=2..4", "--like", "all"], ["--like is of one job"]),
        (["--sweep", "gpus=2..4", "--sensitivity"], ["--sensitivity is of one job"]),
        (["--sweep", "gpus=2..4", "--series", "2:gpt2-small"], ["not allowed with"]),
        (["--series", "2:gpt2-small"], ["--model is decided by --series, got gpt2-small"]),
        (["--series", "2"], ["--series", "GPUS:MODEL", "got '2'"]),
        (["--series", "x:gpt2-small"], ["--series", "whole number", "'x:gpt2-small'"]),
        (["--gpus", "8", "--csv", "/nowhere/a.csv"], ["--csv", "/nowhere"]),
        (["--gpus", "8", "--csv", "a.x", "--json", "a.x"], ["a.x", "twice"]),
        (["--gpus", "8", "--price", "0"], ["--price", "> 0", "got 0"]),
    ],
)
def test_mistakes(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    assert main([*SMALL, *BATCH, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in expected), message


def test_a_model_of_a_series_that_does_not_exist(capsys: Capture) -> None:
    arguments = ["plan", "--machine", "dgx-a100", *BATCH, "--series", "2:gpt2-smal"]
    assert main(arguments) == 2
    assert "did you mean gpt2-small" in capsys.readouterr().err


def test_model_and_batch_must_be_given(capsys: Capture) -> None:
    assert main(["plan", "--machine", "dgx-a100", "--gpus", "8"]) == 2
    message = capsys.readouterr().err
    assert "expected --model" in message and "expected --global-batch" in message
