"""`axonn-ext memorize`: its training, measurements, files and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_ext.cli import main
from axonn_ext.train.memorization.generated_text import TextGenerator
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run
from trained_here import train_here

SMALL = (
    "--sizes", "32x1", "--sequence-length", "64", "--repetitions", "0,1,12", "--per-bucket", "2",
    "--background-size", "12", "--batch-size", "4", "--train.device", "cpu", "--train.threads", "1",
    "--model.num_heads", "2",
)  # fmt: skip


def memorize(*arguments: object) -> int:
    threads = torch.get_num_threads()
    try:
        return main(["memorize", *map(str, arguments)])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of bytes, for sequences of 64."""
    folder = tmp_path_factory.mktemp("memorize")
    train_here(
        folder / "run", checkpoint__interval=6, model__family="llama", model__sequence_length=64,
        train__eval_interval=0,
    )  # fmt: skip
    assert main(["checkpoint", "export", str(folder / "run"), str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 56 to 64 bytes, two for each of four buckets, and one that is too short."""
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    lines = [
        {"text": text, "repetitions": (0, 1, 4, 6)[number % 4]}
        for number, text in enumerate(TextGenerator(1).documents(8, 56, 64))
    ]
    lines.append({"text": "short", "repetitions": 1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_both_arms_are_trained_measured_and_shown(tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    assert memorize("--out", folder, *SMALL) == 0
    out = capsys.readouterr().out
    found = results(folder)
    assert [(arm["model"], arm["arm"]) for arm in found["arms"]] == [
        ("32x1", "plain"), ("32x1", "goldfish")
    ]  # fmt: skip
    plain, goldfish = found["arms"]
    for arm in found["arms"]:
        assert [bucket["repetitions"] for bucket in arm["buckets"]] == [0, 1, 12]
        assert [bucket["documents"] for bucket in arm["buckets"]] == [2, 2, 2]
        assert arm["parameters"] == plain["parameters"] > 10_000
        run_folder = folder / "32x1" / arm["arm"]
        metrics = read_metrics(run_folder)
        assert len(metrics.steps) == arm["steps"] == plain["steps"]
        assert metrics.evaluations[-1].eval_loss == arm["validation_loss"]
        measured = json.loads((run_folder / "extraction.json").read_text())
        assert measured["buckets"] == arm["buckets"]
    # With the same weights and order, the first losses differ only by the dropped targets.
    firsts = [read_metrics(folder / "32x1" / arm).steps[0].loss for arm in ("plain", "goldfish")]
    assert firsts[0] != firsts[1]
    assert firsts[0] == pytest.approx(firsts[1], rel=0.02)
    assert plain["validation"][0] == goldfish["validation"][0]
    assert plain["validation_loss"] < plain["validation"][0][1]
    assert "32x1, arm 2 of 2: goldfish" in out
    assert "of documents seen 12 times it repeats" in out
    assert (folder / "memorization.png").stat().st_size > 10_000
    text = (folder / "results.json").read_bytes()
    # Finished work is not repeated, but is not mistaken for another experiment.
    steps = (folder / "32x1" / "plain" / "metrics.jsonl").stat().st_mtime_ns
    assert memorize("--out", folder, *SMALL, "--resume") == 0
    assert (folder / "results.json").read_bytes() == text
    assert (folder / "32x1" / "plain" / "metrics.jsonl").stat().st_mtime_ns == steps
    inside = folder / "32x1" / "documents.jsonl"
    for options, message in (
        (("--overwrite", "--documents", inside), "expected a path that is not in --out"),
        (("--resume", "--seed", 1), "has seed 0, not 1; give the same options, or another folder"),
        ((), "expected a new or empty folder"),
    ):
        capsys.readouterr()
        assert memorize("--out", folder, *SMALL, *options) == 2
        assert message in capsys.readouterr().err
    # A damaged file is named.
    (folder / "32x1" / "plain" / "extraction.json").write_text("{")
    assert memorize("--out", folder, *SMALL, "--resume") == 2
    assert "extraction.json" in capsys.readouterr().err


def test_documents_that_have_changed_are_not_trained_on(tmp_path, capsys) -> None:
    path, folder = tmp_path / "documents.jsonl", tmp_path / "run"
    texts = TextGenerator(1).documents(7, 60, 64)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ("--out", folder, "--documents", path, *SMALL)
    assert memorize(*options, "--goldfish-window", "target") == 0
    assert "32x1: 6 of 7 documents are used" in capsys.readouterr().err
    assert results(folder)["settings"]["goldfish_window"] == "target"
    assert 'window = "target"' in (folder / "32x1" / "goldfish" / "config.toml").read_text()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    for more, message in (
        ((), "goldfish_window 'target', not 'before'"),
        (("--goldfish-window", "target"), "the documents, the background or the vocabulary are no"),
    ):
        assert memorize(*options, "--resume", *more) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goldfish-h", 65), "goldfish.h: expected at most 64 (model.sequence_length), got 65"),
        (("--sizes", "128x1,32x1", "--model.num_heads", 64), "num_heads=64"),
    ],
)  # fmt: skip
def test_what_one_arm_or_size_refuses_stops_all(tmp_path, capsys, arguments, message) -> None:
    folder = tmp_path / "run"
    assert memorize("--out", folder, *SMALL, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(folder.rglob("metrics.jsonl")), "an arm was trained before"


def test_a_model_that_is_there_is_measured(model, documents, tmp_path, capsys) -> None:
    options = ("--vocabulary", "bytes", "--device", "cpu")
    path = tmp_path / "found.json"
    command = ("--evaluate", model, "--documents", documents, *options, "--json", path)
    assert memorize(*command) == 0
    captured = capsys.readouterr()
    assert "left out: 1 documents of at most 50 tokens" in captured.err
    assert "continued 8 of 8 documents" in captured.err
    buckets = json.loads(path.read_text())["buckets"]
    assert [(b["repetitions"], b["documents"]) for b in buckets] == [(0, 2), (1, 2), (4, 2), (6, 2)]
    assert all(b["low"] <= b["share"] <= b["high"] for b in buckets)
    assert all(0 < b["loss"] < 7 for b in buckets)
    assert "95 % interval" in captured.out
    # A checkpoint is exported automatically; a run's folder works like its checkpoint.
    again = tmp_path / "again.json"
    command = ("--evaluate", model.parent / "run", "--documents", documents, *options)
    assert memorize(*command, "--json", again) == 0
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["x=2,z=2", "data=2,pipe=2"])
def test_four_processes_measure_what_one_does(model, documents, tmp_path, grid) -> None:
    files = []
    for name, shape in (("one", "x=1"), ("four", grid)):
        files.append(tmp_path / name)
        command = [*AXONN, "memorize", "--evaluate", str(model), "--documents", str(documents)]
        command += ["--vocabulary", "bytes", "--grid", shape, "--json", str(files[-1])]
        finished = run(command)
        assert finished.status == 0, finished.output
    one, four = (json.loads(file.read_text())["buckets"] for file in files)
    for a, b in zip(one, four, strict=True):
        assert a.pop("loss") == pytest.approx(b.pop("loss"), rel=1e-5)  # sums in another order
        assert a == b


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goldfish-k", "1"], "--goldfish-k: expected a whole number >= 2, got 1"),
        (["--goldfish-h", "0"], "--goldfish-h: expected a whole number >= 1, got 0"),
        (["--repetitions", "1,4"], "--repetitions: expected 0, which is the control"),
        (["--repetitions", "0,4,4"], "--repetitions: expected 0, which is the control"),
        (["--repetitions", "0,x"], "--repetitions: expected N,N,..., got 0,x"),
        (["--sizes", "100x2"], "--sizes: expected HIDDENxLAYERS such as 128x4, HIDDEN a multiple"),
        (["--sizes", "64"], "--sizes: expected HIDDENxLAYERS such as 128x4"),
        (["--sizes", "64x2,64x2"], "--sizes: expected models of different names, got 64x2 twice"),
        (["--sequence-length", "50"], "--sequence-length: expected a whole number >= 51, got 50"),
        (["--background-size", "1"], "--background-size: expected 0, or at least 2"),
        (["--background", "a", "--background-size", "9"], "--background-size: give one of them"),
        (["--data.order", "windows"], "--data.order: the experiment decides it itself"),
        (["--model.hidden_size", "64"], "--model.hidden_size: the experiment decides it itself"),
        (["--train.steps", "9"], "--train.steps: the experiment decides it itself"),
        (["--train.stepz", "9"], "unknown key train.stepz"),
        (["--words"], "unknown argument --words"),
        (["--resume"], "--resume goes on with the experiment in --out FOLDER"),
        (["--json", "a.json"], "--json is only for --evaluate"),
        (["--documents", "none.jsonl"], "cannot read none.jsonl: No such file"),
        (["--documents", ""], "--documents: expected a name, got an empty one"),
        (["--model", "x" * 300, "--sequence-length", "64"], "error: xxx"),
        (["--vocabulary", "none.json"], '--vocabulary: expected "bytes" or a tokenizers JSON'),
        (["--model", "none"], "--model none: only the config.json of a Hugging Face folder"),
        (["--model", "none", "--sequence-length", "64"], "none: expected a Hugging Face folder"),
        (["--evaluate", "none"], "--evaluate needs --documents FILE"),
        (["--evaluate", "none", "--seed", "0"], "--seed does not go with --evaluate"),
        (["--goldfish-window", "after"], "--goldfish-window: invalid choice: 'after'"),
        (["--evaluate", "none", "--documents", "a.jsonl"], "none: expected a Hugging Face folder"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert memorize(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "short"}] * 4, "expected documents of more than 50 tokens"),
        ([{"text": "a" * 60}], "the bucket of 6 repetitions is empty"),
        ([{"text": "a" * 60}, {"text": "a" * 60}], "buckets overlap"),
    ],
)
def test_documents_that_are_refused(tmp_path, capsys, lines, message) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--out", tmp_path / "run", "--documents", path, "--background-size", 2)
    assert memorize(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "documents.jsonl" in error or "bucket of 6" in error
