"""Comparisons in a plan's output: another grid, other frameworks, and other links."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.cli import main
from axonn_ext.cli.plan.report import TIE_MARK
from axonn_ext.planner.search.frameworks import FRAMEWORKS
from axonn_ext.planner.uncertainty import RANGE, TIE
from axonn_ext.spec.family import FAMILIES, find_family

Capture = pytest.CaptureFixture[str]
PLAN = ("plan", "--model", "gpt2-medium", "--machine", "perlmutter", "--global-batch", "128",
        "--gpus", "16")  # fmt: skip


def planned(folder: Path, *arguments: str) -> Any:
    path = folder / "plan.json"
    assert main([*PLAN, *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The plan of all grids as JSON, and the printed output."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        content = planned(tmp_path_factory.mktemp("plain"), "--top", "20")
    return content, shown.getvalue()


def last_numbers(out: str, label: str) -> list[float]:
    line = next(line for line in out.splitlines() if line.startswith(label))
    return [float(text.replace(",", "")) for text in line[len(label) :].split()]


# --- A grid compared with the best ---------------------------------------------------------------


def test_a_grid_is_compared_with_the_best_and_where_their_times_differ(
    tmp_path: Path, plain: tuple[Any, str], capsys: Capture
) -> None:
    best = plain[0]["configs"][0]
    content = planned(tmp_path, "--grid", "x=8,data=*")
    out, asked, beside = capsys.readouterr().out, content["configs"][0], content["beside"]
    assert all(c["grid"]["x"] == 8 for c in content["configs"])
    assert (beside["grid"], beside["step_time_s"]) == (best["grid"], best["step_time_s"])
    more = asked["step_time_s"] / best["step_time_s"] - 1
    assert f"({more:.1%}) longer: waiting for x" in out
    kinds = beside["seconds_by_kind"]
    for place, step in enumerate((asked, best)):
        total = sum(seconds[place] for seconds in kinds.values())
        assert total == pytest.approx(step["step_time_s"], rel=0.01)
        for axis, seconds in step["exposed_s"].items():
            assert kinds.get(f"waiting for {axis}", [0, 0])[place] == seconds
    shown = last_numbers(out, "step ")
    assert shown[0] == pytest.approx(asked["step_time_s"] * 1e3, abs=0.01)
    assert shown[2] == pytest.approx(shown[0] - shown[1], abs=0.02)
    row = next(line for line in out.partition("\naxis ")[2].splitlines() if line[:2] == "x ")
    assert row.split()[1:3] == ["8", str(best["grid"]["x"])]


def test_the_best_grid_beside_itself(
    tmp_path: Path, plain: tuple[Any, str], capsys: Capture
) -> None:
    best = plain[0]["configs"][0]
    grid = ",".join(f"{axis}={size}" for axis, size in best["grid"].items())
    content = planned(tmp_path, "--grid", grid)
    assert content["configs"] == [best]
    assert "the best of all grids is among those of --grid" in capsys.readouterr().out


def test_stages_of_a_grid_need_no_other_option(tmp_path: Path) -> None:
    configs = planned(tmp_path, "--grid", "pipe=2", "--schedule", "1f1b")["configs"]
    assert {c["grid"]["pipe"] for c in configs} == {2}
    assert {c["pipeline"]["schedule"] for c in configs} == {"1f1b"}
    bounded = planned(tmp_path, "--grid", "pipe=!1", "--pipe", "4", "--top", "50")["configs"]
    assert {c["grid"]["pipe"] for c in bounded} == {2, 4}


# --- Other frameworks ----------------------------------------------------------------------------


def test_other_frameworks_beside_ours(tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "plan.png"
    content = planned(tmp_path, "--like", "all", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    out, rows = capsys.readouterr().out, content["like"]
    assert [row["like"] for row in rows] == ["ours", "ours, with all of these", *FRAMEWORKS]
    assert rows[0]["config"] == content["configs"][0]
    steps = [row["config"]["step_time_s"] for row in rows]
    assert steps[1] == min(steps)
    for name, step in zip(FRAMEWORKS, steps[2:], strict=True):
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert line.rstrip().endswith(f"{step / steps[0]:.2f}")
        assert f"{name}: {FRAMEWORKS[name].takes} ({FRAMEWORKS[name].source})" in out


def test_a_framework_for_which_nothing_fits(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "plan.json"
    large = [*PLAN, "--model", "gpt-20b", "--like", "ddp,zero3", "--json", str(path)]
    assert main(large) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ddp +- *$", out, re.MULTILINE)
    rows = {row["like"]: row for row in json.loads(path.read_text())["like"]}
    assert rows["ddp"]["config"] is None and "does not fit in memory" in rows["ddp"]["problem"]
    assert rows["zero3"]["config"]["grid"]["z"] == 16


# --- Uncertainty ---------------------------------------------------------------------------------


def test_ties_are_marked(plain: tuple[Any, str]) -> None:
    configs, rows = plain[0]["configs"], plain[1].splitlines()[4:]
    best = configs[0]["step_time_s"]
    ties = [c["step_time_s"] <= (1 + TIE) * best for c in configs]
    for row, tie, number in zip(rows, ties, range(1, 21), strict=False):
        assert re.match(rf" *{number} ", row)
        assert (f"{number} {TIE_MARK} " in row) == (tie and number > 1)
    assert True in ties[1:] and False in ties
    low, high = RANGE
    assert f"{low:.2f} to {high:.2f} times what was predicted" in "\n".join(rows)


# --- Other links ---------------------------------------------------------------------------------


def test_sensitivity(tmp_path: Path, capsys: Capture) -> None:
    content = planned(tmp_path, "--sensitivity")
    out, rows = capsys.readouterr().out, content["sensitivity"]
    first = content["configs"][0]["step_time_s"]
    assert len(rows) == 8
    for row in rows:
        line = next(line for line in out.splitlines() if line.startswith(row["if"]))
        assert f"{row['step_time_s'] / first - 1:+.1%}" in line
        assert row["best_step_time_s"] <= row["step_time_s"]
    change = "levels.cluster.bytes_per_s=" + str(0.8 * 85.9e9)
    slower = next(row for row in rows if row["if"] == "bandwidth of cluster -20%")
    changed = planned(tmp_path, "--set", change)
    assert changed["configs"][0]["step_time_s"] == pytest.approx(slower["best_step_time_s"])
    assert changed["machine"] == f"perlmutter with {change}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--grid", "x=3"], ["no grid of 16 GPUs", "x=3"]),
        (["--grid", "w=3"], ["--grid", "AXIS=SIZE", "'w=3'"]),
        (["--grid", "pipe=*"], ["--grid", "pipe=*", "--pipe N"]),
        (["--like", "megatrn"], ["--like", "megatron", "'megatrn'"]),
        (["--like", "ddp,ddp"], ["--like", "'ddp,ddp'"]),
        (["--set", "slowdown"], ["--set", "KEY=VALUE", "'slowdown'"]),
        (["--set", "levels.nod.ranks=3"], ["--set", "did you mean node"]),
        (["--set", "slowdown=0.5"], ["--set", "slowdown", ">= 1", "0.5"]),
    ],
)
def test_mistakes(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    assert main([*PLAN, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in expected), message


# --- Models of every family ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hugging_face_folder_of_every_family(name: str, tmp_path: Path) -> None:
    theirs = find_family(name).hugging_face
    sizes = {
        "vocab_size": 1024, "hidden_size": 256, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 4, "intermediate_size": 512, "sequence_length": 128,
    }  # fmt: skip
    config: dict[str, object] = {
        theirs.keys[ours]: size for ours, size in sizes.items() if ours in theirs.keys
    }
    config |= {"model_type": theirs.model_type, **theirs.when}
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = planned(tmp_path, "--model", str(tmp_path), "--gpus", "8", "--seq", "64")
    assert content["model"]["family"] == name
    assert (content["model"]["hidden_size"], content["model"]["num_layers"]) == (256, 2)
    assert content["configs"]
