"""Each option of the optimizer and its schedule affects a run; none is read and ignored."""

from __future__ import annotations

import dataclasses

import pytest

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import OptimTable
from axonn_ext.train.trainer import make_schedule
from trained_here import train_here

# wsd has all keys of schedules. Values that must change training, and values that change only the
# place of the state, or evaluations.
BASE = {"optim.schedule": "wsd", "optim.decay_fraction": 0.34}
OTHER = {
    "lr": 2e-3, "final_lr_fraction": 0.9, "warmup_steps": 4, "weight_decay": 2.0, "beta1": 0.5,
    "beta2": 0.5, "eps": 1e-2, "clip_norm": 0.05, "schedule": "cosine", "warmup_fraction": 0.8,
    "decay_fraction": 0.7, "decay_type": "1-sqrt",
    "groups": '[{names = "*.weight", lr_factor = 0.5}]',
}  # fmt: skip
MUON = {"name": "muon", "momentum": 0.5, "adjust_lr": "original"}  # change training with Muon
SAME = {"ema_decay": 0.5, "zero": 1, "offload": "cpu", "bucket_elements": 64, "offload_folder": ""}


def losses(folder, **options) -> list[float]:
    return [step.loss for step in train_here(folder, **BASE | options).steps]


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(OptimTable)])
def test_a_key_changes_the_losses_or_none_of_them(key: str, plain, muon, tmp_path) -> None:
    name = {"optim.name": "muon"} if key in MUON else {}
    changed = losses(tmp_path / "run", **name | {f"optim.{key}": (OTHER | MUON | SAME)[key]})
    before = muon if key in MUON and key != "name" else plain
    assert (changed == before) == (key in SAME)


def test_no_clipping_is_that_of_any_norm(tmp_path) -> None:
    chosen = [losses(tmp_path / str(norm), **{"optim.clip_norm": norm}) for norm in (0, 1e9)]
    assert chosen[0] == chosen[1]


@pytest.fixture(scope="module")
def muon(tmp_path_factory) -> list[float]:
    return losses(tmp_path_factory.mktemp("muon") / "run", **{"optim.name": "muon"})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.name", "muon", "optim.name is adamw in the checkpoint, muon here"),
        ("optim.groups", '[{names = "*.bias"}]', "optim.groups has 0 in the checkpoint, 1 here"),
    ],
)
def test_a_checkpoint_of_other_options_is_named(key, value, said, tmp_path) -> None:
    keys = {"checkpoint.interval": 2, "train.steps": 2}
    losses(tmp_path / "run", **keys)
    with pytest.raises(UserError, match=said):
        losses(
            tmp_path / "run", **keys | {"checkpoint.resume": "auto", "train.steps": 4, key: value}
        )


def test_muon_refuses_what_it_does_not_support(tmp_path) -> None:
    with pytest.raises(UserError, match="offload must be none with optimizer muon, got 'cpu'"):
        losses(tmp_path / "run", **{"optim.name": "muon", "optim.offload": "cpu"})


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    return losses(tmp_path_factory.mktemp("plain") / "run")


def test_warmup_is_a_number_of_steps_or_a_fraction_of_them() -> None:
    steps, fraction = OptimTable(warmup_steps=5), OptimTable(warmup_fraction=0.1)
    assert make_schedule(steps, 50) == make_schedule(fraction, 50)
    assert make_schedule(fraction, 200).warmup_steps == 20
    assert make_schedule(OptimTable(schedule="wsd", decay_fraction=0.2), 50).decay_steps == 10
