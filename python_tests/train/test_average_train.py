"""Runs that evaluate and export an average of their weights."""

from __future__ import annotations

import shutil

import pytest
import torch

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.export import export
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import RunMetrics, read_metrics
from commands import AXONN, run, small
from trained_here import train_here

OPTIONS = {"checkpoint.interval": 3, "parallel.algorithm": "sequential"}
# The keys that a pretrained model decides.
DECIDED = ("hidden_size", "num_layers", "num_heads")
AVERAGED = OPTIONS | {"optim.ema_decay": 0.5}


def losses(found: RunMetrics) -> list[float]:
    return [m.loss for m in found.steps]


def evaluations(found: RunMetrics) -> list[float]:
    return [m.eval_loss for m in found.evaluations]


def test_only_evaluations_use_the_average(tmp_path, capsys) -> None:
    plain = train_here(tmp_path / "plain", **OPTIONS)
    assert "average" not in capsys.readouterr().out
    averaged = train_here(tmp_path / "run", **AVERAGED)
    shown = capsys.readouterr().out
    assert shown.count("on the held-out text (average of the weights)") == len(averaged.evaluations)
    assert losses(averaged) == losses(plain)
    before, *after = zip(evaluations(averaged), evaluations(plain), strict=True)
    assert before[0] == before[1]
    assert all(a > b for a, b in after), "an average lags behind"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    resumed = train_here(tmp_path / "run", **AVERAGED, checkpoint__resume="auto")
    assert losses(resumed) == losses(averaged)
    assert evaluations(resumed) == evaluations(averaged)


def test_the_final_and_the_exported_model_are_the_average(tmp_path) -> None:
    """With this decay, it is nearly the model that the run began with."""
    from safetensors.torch import load_file

    train_here(tmp_path / "base", **OPTIONS | {"train.steps": 3})
    base = tmp_path / "model"
    export(tmp_path / "base" / "checkpoints" / "step-00000003", base, dtype="fp32")
    farthest = {}
    for decay in (0.0, 0.999999):
        folder = tmp_path / f"run-{decay}"
        train_here(
            folder, **{f"model.{key}": None for key in DECIDED}, model__pretrained=base,
            data__vocabulary="bytes", optim__ema_decay=decay, train__steps=3,
            checkpoint__interval=3,
        )  # fmt: skip
        exported = tmp_path / f"exported-{decay}"
        export(folder / "checkpoints" / "step-00000003", exported, dtype="fp32")
        ours, theirs, again = (
            load_file(path / "model.safetensors") for path in (folder / "model", base, exported)
        )
        assert ours.keys() == again.keys()
        assert all(torch.equal(ours[name], again[name]) for name in ours)
        farthest[decay] = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert farthest[0.0] > 1e-3
    assert farthest[0.999999] < 1e-6
    saved, last = tmp_path / "run-0.999999/checkpoints/step-00000003", tmp_path / "last"
    export(saved, last, dtype="fp32", average=False)
    trained = load_file(tmp_path / "run-0.0" / "model" / "model.safetensors")
    found = load_file(last / "model.safetensors")
    assert all(torch.equal(found[name], trained[name]) for name in found)


def test_a_disk_keeps_no_average() -> None:
    overrides = (Override("optim.ema_decay", "0.9"), Override("optim.offload", "disk"))
    message = "optim.ema_decay: expected 0 with optim.offload disk, got 0.9"
    with pytest.raises(UserError, match=message):
        prepare(load_config(None, overrides=overrides), world_size=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("z=2", {"overlap.mode": "on", "overlap.prefetch": 2}),
        ("data=2", {"optim.zero": 2, "overlap.mode": "on", "train.dtype": "bf16"}),
        ("pipe=2", {"optim.offload": "cpu"}),
    ],
    ids=str,
)
def test_no_weight_of_the_average_is_trained_on(tmp_path, grid: str, options) -> None:
    """Weights that were gathered for an evaluation are not used in the next step."""
    found = {}
    for decay in (0, 0.5):
        folder, more = tmp_path / str(decay), {"train.micro_batches": 2, "train.eval_interval": 1}
        given = small(**OPTIONS | options | more | {"optim.ema_decay": decay})
        done = run([*AXONN, "train", "--grid", grid, "--out", str(folder), *given])
        assert done.status == 0, done.output
        found[decay] = read_metrics(folder)
    assert losses(found[0]) == losses(found[0.5])
    assert evaluations(found[0]) != evaluations(found[0.5])
