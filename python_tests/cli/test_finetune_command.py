"""`axonn-ext finetune`: its training, files and errors."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from axonn_ext.cli import main
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run
from trained_here import train_here

OPTIONS = (
    "--data.vocabulary", "bytes", "--sequence-length", "32", "--train.threads", "1",
    "--train.device", "cpu", "--train.eval_interval", "4", "--lr", "3e-3", "--batch-size", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    train_here(folder / "run", checkpoint__interval=6, model__family="llama")
    assert main(["checkpoint", "export", str(folder / "run"), str(folder / "model")]) == 0
    # Like published models, it supports longer sequences than the fine-tuning uses.
    config = json.loads((folder / "model" / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [
        {"prompt": f"{a}+{b}=", "completion": f"{a + b}!"} for a in range(10) for b in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def finetune(model: Path, data: Path, out: Path, *more: object) -> int:
    threads = torch.get_num_threads()
    try:
        return main(
            ["finetune", "--model", str(model), "--data", str(data), "--out", str(out), *OPTIONS]
            + [str(each) for each in more]
        )
    finally:
        torch.set_num_threads(threads)


def test_it_learns_and_writes_a_model_that_goes_on(model, data, tmp_path, capsys) -> None:
    assert finetune(model, data, tmp_path / "run", "--epochs", 6) == 0
    out = capsys.readouterr().out
    metrics = read_metrics(tmp_path / "run")
    assert metrics.steps[-1].loss < 0.7 * metrics.steps[0].loss
    [(sequences, steps)] = re.findall(r"6 epochs are (\d+) sequences, or (\d+) steps", out)
    assert len(metrics.steps) == int(steps) == math.ceil(int(sequences) / 4)
    assert "95 examples, 5 held out, bytes, packed" in out
    folder = tmp_path / "run" / "model"
    assert f"model: {folder}" in out and "no weights were saved" not in out
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    before, after = (load_file(path / "model.safetensors") for path in (model, folder))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert finetune(folder, data, tmp_path / "again", "--steps", 1) == 0
    again = read_metrics(tmp_path / "again").steps[0].loss
    assert again == pytest.approx(metrics.evaluations[-1].eval_loss, rel=0.3)


@pytest.mark.parametrize(
    ("options", "warmup"),
    [
        (("--steps", 12), 1), (("--train.steps", 12), 1), (("--steps", 200), 10),
        (("--epochs", 1), 0), (("--steps", 12, "--optim.warmup_steps", 5), 5),
    ],
)  # fmt: skip
def test_a_tenth_of_the_steps_warms_up(model, data, options, warmup, monkeypatch) -> None:
    def stop(args: argparse.Namespace, arguments: list[str], *, note: str) -> int:
        given = [each for each in arguments if each.startswith("--optim.warmup_steps=")]
        assert given[-1] == f"--optim.warmup_steps={warmup}"
        return 0

    monkeypatch.setattr("axonn_ext.cli.train.run", stop)
    assert finetune(model, data, Path("unused"), *options) == 0


@pytest.mark.parametrize(
    ("longest", "options", "expected"),
    [
        (4096, (), {"model.sequence_length": "1024", "optim.lr": "2e-5"}),
        (512, (), {"model.sequence_length": "512"}),
        (4096, ("--sequence-length", "2048"), {"model.sequence_length": "2048"}),
        (4096, ("--lora", "4"), {"optim.lr": "2e-4", "lora.rank": "4", "lora.alpha": "8"}),
        (4096, ("--lora", "4", "--lora-alpha", "3"), {"lora.alpha": "3.0"}),
        (4096, ("--lora", "4", "--lr", "1e-3"), {"optim.lr": "0.001"}),
    ],
)
def test_what_is_left_out_is_as_help_says(
    model, data, tmp_path, longest, options, expected, monkeypatch
) -> None:
    given: dict[str, str] = {}

    def stop(args: argparse.Namespace, arguments: list[str], *, note: str) -> int:
        pairs = (argument.removeprefix("--").split("=", 1) for argument in arguments)
        given.update((key, value) for key, value in pairs)
        return 0

    long = tmp_path / "model"
    shutil.copytree(model, long)
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
    monkeypatch.setattr("axonn_ext.cli.train.run", stop)
    command = ["finetune", "--model", long, "--data", data, "--steps", 2, *options]
    assert main([str(word) for word in command]) == 0
    assert {key: given[key] for key in expected} == expected


def test_adapters_train_alone_and_resume(model, data, tmp_path, capsys) -> None:
    options = ("--lora", 4, "--checkpoint.interval", 3, "--optim.final_lr_fraction", 1)
    assert finetune(model, data, tmp_path / "whole", "--steps", 6, *options) == 0
    assert finetune(model, data, tmp_path / "run", "--steps", 3, *options) == 0
    capsys.readouterr()
    resumed = (*options, "--resume", "auto")
    assert finetune(model, data, tmp_path / "run", "--steps", 6, *resumed) == 0
    assert "resumed" in capsys.readouterr().out
    whole, parts = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "run")
    )
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert any(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    losses = [s.loss for s in read_metrics(tmp_path / "run").steps]
    assert losses == [s.loss for s in read_metrics(tmp_path / "whole").steps]
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert Path(config["base_model_name_or_path"]) == model


@pytest.mark.parametrize("lora", [(), ("--lora", "4")])
def test_fp16_learns_what_fp32_learns(model, data, tmp_path, lora) -> None:
    for dtype in ("fp32", "fp16"):
        options = ("--steps", 5, "--train.dtype", dtype, *lora)
        assert finetune(model, data, tmp_path / dtype, *options) == 0
    wide, low = (read_metrics(tmp_path / dtype).steps for dtype in ("fp32", "fp16"))
    assert [step.loss_scale for step in low] == [2.0**16] * 5
    for a, b in zip(wide, low, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)  # fp16 rounds to 2**-11, a loss is a mean
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-2)
        assert a.grad_norm != b.grad_norm


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("--lora", "4")])
def test_four_processes_have_the_losses_of_one(model, data, tmp_path, lora) -> None:
    assert finetune(model, data, tmp_path / "one", "--steps", 5, *lora) == 0
    command = [*AXONN, "finetune", "--model", str(model), "--data", str(data), "--steps", "5"]
    command += ["--out", str(tmp_path / "four"), "--grid", "x=2,z=2", *OPTIONS, *lora]
    finished = run(command)
    assert finished.status == 0, finished.output
    one, four = (read_metrics(tmp_path / name) for name in ("one", "four"))
    for a, b in zip(one.steps, four.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)  # fp32 sums in different orders
    assert four.evaluations[-1].eval_loss == pytest.approx(one.evaluations[-1].eval_loss, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.vocabulary", ""], "tokenizer.json is not a file"),
        (["--sequence-length", "128"], "model.sequence_length: expected at most 64"),
        (["--model.hidden_size", "64"], "model.hidden_size: expected no value with model."),
        (["--lora", "4", "--parallel.heads_over_y", "true"], "heads_over_y: expected false with"),
        (["--lora", "33"], "lora.rank: expected at most 32, the model's features, got 33"),
        (["--out", "/dev/null"], "--out /dev/null: expected a folder, got a file"),
        (["--lora-alpha", "4"], "--lora-alpha and --lora-targets need --lora RANK"),
        (["--epochs", "0"], "--epochs: expected a whole number >= 1"),
        (["--grid", "x=8"], "num_heads: 4 must be divisible by 8"),
        (["--epochs", "2", "--train.steps", "3"], "--epochs and train.steps: give one of them"),
        (["--data.max_bytes", "9"], "data.max_bytes: expected 0 with data.order examples"),
        (["--data.text", ""], "data.text: data.order examples needs a text"),
        (["--bogus"], "unknown argument --bogus"),
        (["--data.order", "windows"], "--epochs counts examples: give --steps"),
        (["--model.implementation", "plain"], "plain does not support data.order examples"),
    ],
)
def test_mistakes_are_named(options, message, model, data, tmp_path, capsys) -> None:
    assert finetune(model, data, tmp_path / "run", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not (tmp_path / "run").exists()


def test_a_target_that_the_model_does_not_have(model, data, tmp_path, capsys) -> None:
    options = ("--lora", 4, "--lora-targets", "q_proj, c_attn")
    assert finetune(model, data, tmp_path / "run", *options) == 2
    captured = capsys.readouterr()
    assert "error: lora.targets: add_adapters: targets must be all-linear, or some of" in (
        captured.err
    )
    assert captured.out == "", "how many epochs, or a header, of a run that cannot begin"
    assert not (tmp_path / "run").exists()


def test_what_a_run_begins_with_is_not_replaced(model, data, tmp_path, capsys) -> None:
    shutil.copytree(model, tmp_path / "run" / "model")
    base = tmp_path / "run" / "model"
    assert finetune(base, data, tmp_path / "run", "--steps", 1, "--overwrite") == 2
    expected = f"model.pretrained {base}: expected a folder outside of the run's own"
    assert expected in capsys.readouterr().err
    assert (base / "model.safetensors").exists()


def test_an_end_outside_of_the_vocabulary(model, data, tmp_path, capsys) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 50256}')
    assert finetune(other, data, tmp_path / "run") == 2
    assert "expected an eos_token_id below 256" in capsys.readouterr().err


def test_a_run_that_is_to_go_on_needs_its_folder(model, data, capsys) -> None:
    arguments = ["finetune", "--model", str(model), "--data", str(data), "--resume", "auto"]
    assert main(arguments) == 2
    assert "--resume auto goes on with the run in --out FOLDER" in capsys.readouterr().err


def test_a_bad_line_and_a_missing_model(model, data, tmp_path, capsys) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(data.read_text() + '{"prompt": 1}\n')
    assert finetune(model, bad, tmp_path / "run") == 2
    assert (
        f'{bad}, line 101: expected an object with "prompt" and "completion"'
        in capsys.readouterr().err
    )
    assert finetune(tmp_path, data, tmp_path / "run") == 2
    assert f"--model: {tmp_path}: expected a folder with config.json" in capsys.readouterr().err
