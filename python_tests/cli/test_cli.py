"""The command line: help, printed configuration, comparison."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import axonn_ext
from axonn_ext.cli import evaluate, generate, main, train
from axonn_ext.cli.train import parse_overrides
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import EvaluationMetrics, StepMetrics
from commands import AXONN, run

Capture = pytest.CaptureFixture[str]


def write_run(folder: Path, losses: list[float], eval_loss: float = 2.0) -> Path:
    """Writes the files of a run; only the losses matter."""
    folder.mkdir()
    lines: list[object] = [
        StepMetrics(step, loss, 1.0, 1e-3, 100 * step, 10.0, 0.1, 1 << 20, 0.0)
        for step, loss in enumerate(losses, start=1)
    ]
    lines.append(EvaluationMetrics(len(losses), 100 * len(losses), eval_loss))
    text = "\n".join(json.dumps(dataclasses.asdict(line)) for line in lines)  # type: ignore[call-overload]
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_version_and_help(capsys: Capture) -> None:
    for arguments, expected in (
        (["--version"], f"axonn-ext {axonn_ext.__version__}"),
        (["--help"], "axonn-ext compare runs/demo runs/demo-plain"),
        (["train", "--help"], "hidden_size = 256"),
        (["compare", "--help"], "--tolerance"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def test_module_is_the_command() -> None:
    done = run([*AXONN, "--version"])
    assert (done.status, done.output) == (0, f"axonn-ext {axonn_ext.__version__}\n")


def test_print_config_prints_what_it_would_run(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[train]\nsteps = 7\n")
    arguments = ["train", "--config", str(path), "--grid", "2x1x3", "--model.hidden-size", "512"]
    assert main([*arguments, "--optim.lr=5e-4", "--print-config"]) == 0
    printed = tmp_path / "b.toml"
    printed.write_text(capsys.readouterr().out)
    config = load_config(printed)
    assert (config.grid.x, config.grid.y, config.grid.z) == (2, 1, 3)
    assert (config.train.steps, config.model.hidden_size, config.optim.lr) == (7, 512, 5e-4)


def test_overrides() -> None:
    arguments = ["--a.b", "1", "--c.d_e=x=y", "--f.g-h", "-1", "--i.j="]
    assert parse_overrides(arguments) == (
        Override("a.b", "1"), Override("c.d_e", "x=y"), Override("f.g_h", "-1"), Override("i.j", "")
    )  # fmt: skip
    for bad, message in (
        (["--a.b"], "expected a value"),
        (["--a.b", "--c.d=1"], "--a.b: expected a value"),
        (["--nproc-per-node", "2"], "unknown argument --nproc-per-node"),
        (["file.toml"], "unknown argument file.toml"),
    ):
        with pytest.raises(UserError, match=message):
            parse_overrides(bad)


def parser_of(command: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    return parser


def test_started_ranks_are_told_all_that_generate_was() -> None:
    given = [
        "generate", "--model=m", "--adapter=a", "--prompt=one", "--prompt=two", "--prompts=p.jsonl",
        "--grid=x=2", "--max-new-tokens=7", "--temperature=0.5", "--top-k=3", "--top-p=0.9",
        "--seed=11", "--vocabulary=bytes", "--dtype=bf16", "--device=cpu", "--json",
    ]  # fmt: skip
    parser = parser_of(generate)
    asked, default = parser.parse_args(given), parser.parse_args(["generate", "--model=other"])
    untold = [name for name in vars(asked) if vars(asked)[name] == vars(default)[name]]
    assert untold == ["command", "run"], "every option has another value than its default"
    assert parser.parse_args(["generate", *generate._arguments(asked)]) == asked


def test_started_ranks_are_told_all_that_evaluate_was() -> None:
    given = [
        "evaluate", "m", "--adapter=a", "--text=t", "--tasks=a,b", "--include-path=i",
        "--num-fewshot=2", "--limit=0.5", "--apply-chat-template", "--grid=x=2",
        "--vocabulary=bytes", "--dtype=bf16", "--device=cpu", "--json=j.json",
    ]  # fmt: skip
    parser = parser_of(evaluate)
    asked, default = parser.parse_args(given), parser.parse_args(["evaluate", "other"])
    untold = [name for name in vars(asked) if vars(asked)[name] == vars(default)[name]]
    assert untold == ["command", "run"], "every option has another value than its default"
    assert parser.parse_args(["evaluate", *evaluate._arguments(asked, Path("m"))]) == asked


def test_started_ranks_are_told_all_that_train_was(tmp_path: Path) -> None:
    given = ["train", "--config=c.toml", "--grid=auto", "--overwrite", "--profile"]
    asked = parser_of(train).parse_args(given)
    config = load_config(None, grid="x=2,y=2")
    overrides = (Override("optim.lr", "0.5"), Override("checkpoint.resume", "auto"))
    told = train._worker_arguments(asked, config, tmp_path / "run", overrides)
    rank, rest = parser_of(train).parse_known_args(told)
    assert (rank.config, rank.out) == (Path("c.toml"), tmp_path / "run")
    assert rank.grid == str(config.grid), "the chosen one"
    assert rank.overwrite and rank.profile
    assert parse_overrides(rest) == overrides


def test_compare_equal_runs(tmp_path: Path, capsys: Capture) -> None:
    losses = [5.0 - step / 20 for step in range(40)]
    a = write_run(tmp_path / "grid", [loss * (1 + 1e-5) for loss in losses])
    b = write_run(tmp_path / "plain", losses)
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "largest relative difference of 40 steps: 1.00e-05" in out
    assert "<= 0.001: equal" in out
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert rows[0][:3] == ["step", "grid", "plain"]
    assert [row[0] for row in rows[1:11]][:: len(rows[1:11]) - 1] == ["1", "40"]
    assert (a / "compare.png").stat().st_size > 10_000
    assert main(["compare", str(a), str(b), "--tolerance", "1e-6"]) == 1


def test_compare_finds_the_one_step_that_differs(tmp_path: Path, capsys: Capture) -> None:
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0, 2.0])
    b = write_run(tmp_path / "b", [5.0, 4.0, 3.03, 2.0, 1.9])
    assert main(["compare", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "9.90e-03 at step 3 (> 0.001: different)" in out
    assert "only the 4 common steps of 4 and 5 are compared" in out


def test_compare_takes_no_number_for_a_difference(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [5.0, float("nan")])
    b = write_run(tmp_path / "b", [5.0, 4.0])
    assert main(["compare", str(a), str(b)]) == 1


def test_compare_names_what_is_missing(tmp_path: Path, capsys: Capture) -> None:
    a = write_run(tmp_path / "a", [5.0])
    assert main(["compare", str(a), str(tmp_path / "nothing")]) == 2
    assert "nothing/metrics.jsonl: cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["compare", str(a), str(tmp_path / "broken")]) == 2
    assert "metrics.jsonl, line 1 is not a line of metrics" in capsys.readouterr().err
    assert main(["compare", str(a), str(a), "more"]) == 2
    assert "unknown argument more" in capsys.readouterr().err


def test_runs_without_a_common_step(tmp_path: Path, capsys: Capture) -> None:
    a = write_run(tmp_path / "a", [5.0])
    later = dataclasses.asdict(StepMetrics(9, 1.0, 1.0, 1e-3, 900, 10.0, 0.1, 1 << 20, 0.0))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/metrics.jsonl").write_text(json.dumps(later))
    assert main(["compare", str(a), str(tmp_path / "b")]) == 2
    assert "expected runs with common steps" in capsys.readouterr().err
