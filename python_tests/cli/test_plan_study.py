"""`axonn-ext plan --study`: its output, files, plots and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.cli import main
from axonn_ext.cli.plan.plot import plot_study
from axonn_ext.planner.published.retold import retell
from axonn_ext.planner.published.study import load_study, study_names

pytestmark = pytest.mark.long

INTERFACES = Path(__file__).resolve().parents[2] / "docs" / "interfaces.md"
Capture = pytest.CaptureFixture[str]


def test_studies_are_listed(capsys: Capture) -> None:
    assert main(["plan", "--study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == study_names()


def test_table_and_json_agree(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "study.json"
    assert main(["plan", "--study", "axonn-2023", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    studies: list[dict[str, Any]] = json.loads(path.read_text())["studies"]
    [study] = studies
    assert all(text in out for text in [*study["assumed"], *study["not_modelled"]])
    rows = re.findall(r"^perlmutter .*$", out, re.MULTILINE)
    assert len(rows) == len(study["figures"]) == 11
    for row, figure in zip(rows, study["figures"], strict=True):
        assert f" {figure['gpus']:,} " in row
        assert f" {100 * figure['modelled']:.1f} % " in row
        assert f" {100 * figure['error']:+.0f} % " in row
        assert f"{100 * figure['reported'][0]:.1f}" in row
        config = figure["config"]
        assert not figure["grid_published"]
        sizes = ",".join(f"{axis}={n}" for axis, n in config["grid"].items() if n > 1)
        assert f"{sizes} *;" in row
        assert figure["best_config"]["step_time_s"] <= config["step_time_s"]
    section = INTERFACES.read_text().partition("With `--study`")[2].partition("A configuration:")[0]
    documented = set(re.findall(r'"(\w+)"', section))
    assert documented == {"studies", *study, *study["figures"][0]}


def test_series_are_drawn(tmp_path: Path) -> None:
    study = load_study("axonn-2024")
    rows = tuple(row for row in study.rows if row.case.num_ranks in (2048, 4096, 6144))
    some = replace(study, rows=rows)
    picture = tmp_path / "series.svg"
    plot_study(some, retell(some), picture, error=0.1)
    text = picture.read_text()
    for shown in ("perlmutter", "frontier", "alps", "2,048", "6,144", "10.0 %"):
        assert f"<!-- {shown} -->" in text or shown in text, shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--study", "axonn2024"], ["--study", "axonn2024", "axonn-2024"]),
        (["--study", "axonn-2024", "--gpus", "8"], ["--study", "no --gpus"]),
        (["--study", "list", "--pipe", "2", "--overlap", "on"], ["no --pipe", "no --overlap"]),
        (["--study", "list", "--json", "a.json"], ["--study list", "no --json"]),
        (["--study", "llama-meta", "--plot", "a.png"], ["--plot", "axonn-2024", "llama-meta"]),
        (["--study", "llama-meta", "--plot", "a.gif"], ["--plot", ".png", "a.gif"]),
        (["--gpus", "8"], ["expected --machine, or --study", "expected --model", "--global-batch"]),
        (
            ["--gpus", "8", "--machine", "alps", "--global-batch", "8"],
            ["error: expected --model, unless"],
        ),
    ],
)
def test_mistakes(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    assert main(["plan", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in expected), message
