"""Prompts that a run continues at each evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_ext.cli import main
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.metrics import RunMetrics, read_metrics
from commands import AXONN, run, small
from trained_here import train_here

PROMPTS = ["import ", "def f(x):\n", "x = "]
TOKENS = 9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def with_samples(file: Path) -> dict[str, object]:
    return {"train.samples": file, "train.sample_tokens": TOKENS}


def check_samples(metrics: RunMetrics) -> None:
    assert [m.step for m in metrics.evaluations] == [0, 3, 6]
    for evaluation in metrics.evaluations:
        assert [sample.prompt for sample in evaluation.samples] == PROMPTS
        assert all(1 <= len(sample.text) <= TOKENS for sample in evaluation.samples)
    assert len({sample.text for m in metrics.evaluations for sample in m.samples}) > 3


def check_equal_losses(one: RunMetrics, other: RunMetrics) -> None:
    """Bit by bit."""
    assert [m.loss for m in one.steps] == [m.loss for m in other.steps]
    assert [m.grad_norm for m in one.steps] == [m.grad_norm for m in other.steps]
    assert [m.eval_loss for m in one.evaluations] == [m.eval_loss for m in other.evaluations]


def test_samples_change_no_loss_and_follow_from_the_seed(tmp_path, file, capsys) -> None:
    plain = train_here(tmp_path / "plain")
    assert '"samples"' not in (tmp_path / "plain" / "metrics.jsonl").read_text()
    first = train_here(tmp_path / "first", **with_samples(file))
    shown = capsys.readouterr().out
    again = train_here(tmp_path / "again", **with_samples(file))
    check_samples(first)
    check_equal_losses(plain, first)
    assert again.evaluations == first.evaluations
    # Lines of samples have their breaks escaped, so each is one line.
    assert shown.count("\n         import  -> ") == shown.count("\n         def f(x):\\n -> ") == 3


def test_samples_are_what_generate_draws_from_the_saved_model(tmp_path, file, capsys) -> None:
    """Of the average of the weights, as the evaluation's loss is, only without optim.ema_decay."""
    found = train_here(tmp_path / "run", checkpoint__interval=6, **with_samples(file))
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    arguments = ("--model", tmp_path / "model", "--vocabulary", "bytes", "--prompts", file)
    options = ("--temperature", 1, "--max-new-tokens", TOKENS, "--json")
    assert main(["generate", *map(str, (*arguments, *options))]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = [(sample.prompt, sample.text) for sample in found.evaluations[-1].samples]
    assert [(line["prompt"], line["text"]) for line in lines] == wanted


def test_the_average_of_the_weights_is_sampled(tmp_path, file) -> None:
    """An average that keeps the first weights generates the same at every evaluation."""
    options = {"optim.ema_decay": 0.999999, **with_samples(file)}
    found = train_here(tmp_path / "run", **options).evaluations
    assert found[0].samples == found[1].samples == found[2].samples


def test_a_resumed_run_keeps_the_samples_before_it(tmp_path, file) -> None:
    whole = train_here(tmp_path / "run", checkpoint__interval=3, **with_samples(file))
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-00000003")
    again = train_here(
        tmp_path / "run", checkpoint__interval=3, train__steps=9, checkpoint__resume="auto",
        **with_samples(file),
    )  # fmt: skip
    assert again.evaluations[:2] == whole.evaluations[:2]  # its schedule has more steps
    assert [len(m.samples) for m in again.evaluations] == [3] * 4


@pytest.mark.long
@pytest.mark.parametrize("options", [{"overlap.mode": "on"}, {"optim.zero": 2}])
def test_on_a_grid(tmp_path, file, options) -> None:
    found = []
    for name, more in (("with", with_samples(file)), ("without", {})):
        keys = small(**{**options, **more, "parallel.algorithm": "sequential"})
        command = [*AXONN, "train", "--grid", "z=2,data=2", "--out", str(tmp_path / name), *keys]
        done = run(command)
        assert done.status == 0, done.output
        found.append(read_metrics(tmp_path / name))
    check_samples(found[0])
    check_equal_losses(*found)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {}, "prompts.jsonl: cannot be read: No such file"),
        ("\n", {}, "expected a prompt per line of .*prompts.jsonl, got none"),
        ('{"prompt": ""}', {}, r"line 1 \(train.sample_tokens 9\): expected at least one token"),
        ('\n{"prompt": 3}', {}, "line 2: expected a text in the field prompt"),
        ('{"prompt": "a"}', {"train.sample_tokens": 32},
         r"line 1 \(train.sample_tokens 32\): its 1 tokens and 32 new ones are more than the "
         "model's sequence_length of 32"),
        ('{"prompt": "a"}', {"train.eval_interval": 0},
         r"expected none without evaluations \(train.eval_interval is 0\), got "),
        ('{"prompt": "a"}', {"data.held_out": 0}, r"evaluations \(data.held_out is 0\), got "),
        ('{"prompt": "a"}', {"model.implementation": "plain"},
         "model.implementation plain does not support train.samples; use axonn"),
        ('{"prompt": "a"}', {"train.sample_tokens": 0}, "whole number >= 1, got 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, content, options, message) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        train_here(tmp_path / "run", **{**with_samples(file), **options})
    assert any("train.sample" in problem for problem in caught.value.problems)


def test_a_model_that_is_not_finite_has_no_samples(tmp_path, file, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    options = {"train.samples": f"~/{file.name}", "train.sample_tokens": TOKENS}
    found = train_here(tmp_path / "run", **options, optim__lr=1e36, train__on_nonfinite="skip")
    assert [len(m.samples) for m in found.evaluations] == [len(PROMPTS), 0, 0]


def test_stages_are_refused(tmp_path, file) -> None:
    with pytest.raises(UserError, match=r"train.samples: expected none on .* stages \(pipe=2\)"):
        train_here(tmp_path / "run", grid="pipe=2", **with_samples(file))
