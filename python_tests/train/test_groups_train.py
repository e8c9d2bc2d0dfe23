"""Options of parameters by patterns of their names, in the trainer's file and in runs."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from axonn_ext.spec.optimizer import ParameterGroup
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import Override, load_config, to_toml
from axonn_ext.train.differences import as_json, differences
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small
from trained_here import train_here

FILE = """
[[optim.groups]]
names = "blocks.*.norm_*"
weight_decay = 0.3
lr_factor = 2
[[optim.groups]]
names = "blocks.0.*, wte.*"
frozen = true
"""
GROUPS = (
    ParameterGroup("blocks.*.norm_*", lr_factor=2.0, weight_decay=0.3),
    ParameterGroup("blocks.0.*, wte.*", frozen=True),
)
INLINE = (
    '[{names = "blocks.*.norm_*", lr_factor = 2, weight_decay = 0.3}, '
    '{names = "blocks.0.*, wte.*", frozen = true}]'
)


def losses(folder: Path) -> list[float]:
    found = read_metrics(folder)
    return [m.loss for m in found.steps] + [m.eval_loss for m in found.evaluations]


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(None, overrides=(Override("optim.groups", text),))
    return str(caught.value)


def test_groups_of_a_file_a_flag_and_a_printed_configuration(tmp_path) -> None:
    (path := tmp_path / "run.toml").write_text(FILE)
    config = load_config(path)
    assert config.optim.groups == GROUPS
    assert load_config(None, overrides=(Override("optim.groups", INLINE),)) == config
    path.write_text(to_toml(config))
    assert len(tomllib.loads(path.read_text())["optim"]["groups"]) == 2
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "optim.groups: expected an array of tables [[optim.groups]], got 3"),
        ("norm", 'optim.groups: expected an array of tables [[optim.groups]], got "norm"'),
        ("[1]", "optim.groups: expected an array of tables [[optim.groups]], got [1]"),
        ("[{}]", "optim.groups[0].names must be patterns of names, separated by commas, got ''"),
        ('[{names = "a"}, {name = "b"}]',
         "unknown key optim.groups[1].name on the command line (did you mean names?); keys of "
         "[[optim.groups]]: names, lr_factor, weight_decay, frozen"),
        ('[{names = "a", lr_factor = -1}]',
         "optim.groups[0].lr_factor: expected a finite number >= 0, got -1 on the command line"),
        ('[{names = "a", weight_decay = -0.5}]',
         "optim.groups[0].weight_decay: expected -1 or a finite number >= 0, got -0.5"),
        ('[{names = "a", frozen = 1}]', "optim.groups[0].frozen: expected true or false, got 1"),
        ("[{names = [1]}]",
         "optim.groups[0].names: expected patterns of names, separated by commas, got [1]"),
    ],
)  # fmt: skip
def test_bad_groups_are_named(text: str, message: str) -> None:
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.*.nrm", r"groups\[0\].names: expected patterns that match .* got blocks.\*.nrm; "
         r"its parameters are blocks.\*.attention.out.bias, .*, wte.weight"),
        ("*.bias, nothing", "got nothing; its parameters are"),
        ('*.bias"}, {names = "blocks.1.*.bias',
         r"groups\[1\].names: expected parameters that no earlier group has, got blocks.1.\*.bias"),
        ('*", frozen = true}, {names = "wte.*', r"groups\[1\].names: expected parameters that no"),
        ('wte.*", frozen = true}, {frozen = true, names = "*', "got groups that freeze all"),
    ],
)  # fmt: skip
def test_patterns_that_match_nothing_are_named(tmp_path, names: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_here(tmp_path / "run", optim__groups=f'[{{names = "{names}"}}]')


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora.rank", "4", "optim.groups: expected none with lora.rank"),
        ("model.implementation", "plain", "plain does not support optim.groups; use axonn"),
    ],
)
def test_what_groups_do_not_go_with(key: str, value: str, message: str) -> None:
    overrides = (Override("optim.groups", INLINE), Override(key, value))
    with pytest.raises(UserError, match=message):
        prepare(load_config(None, overrides=overrides), world_size=1)


def test_a_changed_group_is_named_when_a_run_goes_on() -> None:
    before, now = as_json(Config()), as_json(Config())
    del before["optim"]["groups"]
    assert list(differences(before, now)) == []
    now["optim"] = now["optim"] | {"groups": [{"names": "*"}]}
    (line,) = differences(before, now)
    assert line.startswith("optim.groups was [] in the run that is continued, now [{'names'")


def test_a_run_with_groups_goes_on_as_if_never_stopped(tmp_path) -> None:
    folder, options = tmp_path / "run", {"optim.groups": INLINE, "checkpoint.interval": 3}
    options |= {"parallel.algorithm": "sequential"}
    train_here(folder, **options)
    want = losses(folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    train_here(folder, **options, checkpoint__resume="auto")
    assert losses(folder) == want


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("z=2,x=2", {"overlap.mode": "on"}),
        ("data=2", {"optim.zero": 2, "overlap.mode": "on"}),
        ("data=2", {"optim.zero": 1, "optim.offload": "cpu"}),
        ("pipe=2", {"pipeline.schedule": "zero_bubble", "optim.offload": "disk"}),
    ],
    ids=str,
)
def test_every_grid_trains_the_same(one_rank, tmp_path, grid: str, options) -> None:
    """On stages, the first one is completely frozen."""
    folder = tmp_path / "run"
    (path := tmp_path / "run.toml").write_text(FILE)
    arguments = ["--config", str(path), "--grid", grid, "--out", str(folder)]
    done = run([*AXONN, "train", *arguments, *small(**PARTS | options)])
    assert done.status == 0, done.output
    assert losses(folder) == pytest.approx(losses(one_rank), rel=1e-6)


PARTS = {"train.micro_batches": 2, "train.eval_batches": 4}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(folder, **PARTS, **{"optim.groups": INLINE})
    return folder
