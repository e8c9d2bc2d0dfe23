"""Runs end when their evaluations no longer improve."""

from __future__ import annotations

import math
import shutil

import pytest

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.early_stop import EarlyStop
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small
from trained_here import train_here

# Only the first evaluations improve by this much.
STOPS = {
    "train.steps": 12, "train.eval_interval": 2, "train.early_stop_patience": 2,
    "train.early_stop_min_delta": 0.2, "parallel.algorithm": "sequential",
    "checkpoint.interval": 2, "checkpoint.keep_last": 9,
}  # fmt: skip


def test_evaluations_that_are_no_better_are_counted() -> None:
    early = EarlyStop(patience=2, min_delta=0.5)
    seen = []
    for step, loss in enumerate((4.0, 3.0, 2.75, 2.4, 2.0, math.nan)):
        early.saw(step, loss)
        seen.append(early.is_due)
    assert seen == [False, False, False, False, False, True]
    assert early.describe() == (
        "stopped early: the last 2 evaluations did not improve on 2.4000, the loss after step 3 "
        "by more than 0.5"
    )


def test_a_state_is_numbers() -> None:
    early, other = EarlyStop(1, 0.0), EarlyStop(1, 0.0)
    other.load_state_dict(early.state_dict())
    assert not other.is_due and other.state_dict()["best"] is None
    for loss in (2.0, 3.0):
        early.saw(7, loss)
    other.load_state_dict(early.state_dict())
    assert other.is_due and other.describe() == early.describe()
    with pytest.raises(ValueError, match="expected the state of early stopping, got"):
        other.load_state_dict({})


def test_a_resumed_run_stops_at_the_same_step(tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    whole = train_here(folder, **STOPS)
    last = whole.steps[-1].step
    assert last < STOPS["train.steps"] and whole.evaluations[-1].step == last
    assert "stopped early: the last 2 evaluations did not improve on" in capsys.readouterr().out
    train_here(folder, **STOPS, checkpoint__resume="auto")
    assert "nothing is left to do: stopped early: the last 2" in capsys.readouterr().out
    shutil.rmtree(folder / "checkpoints" / f"step-{last:08}")
    resumed = train_here(folder, **STOPS, checkpoint__resume="auto")
    assert [m.step for m in resumed.steps] == list(range(1, last + 1))
    assert resumed.evaluations == whole.evaluations
    more = STOPS | {"train.early_stop_patience": 3}
    assert train_here(folder, **more, checkpoint__resume="auto").steps[-1].step == last + 2


@pytest.mark.parametrize("key", ["train.eval_interval", "data.held_out"])
def test_early_stopping_needs_evaluations(key: str) -> None:
    overrides = (Override("train.early_stop_patience", "2"), Override(key, "0"))
    message = rf"early_stop_patience: expected 0 without evaluations \({key} is 0\), got 2"
    with pytest.raises(UserError, match=message):
        prepare(load_config(None, overrides=overrides), world_size=1)


@pytest.mark.long
@pytest.mark.parametrize("grid", ["x=2", "pipe=2"])
def test_all_ranks_stop_together(tmp_path, grid: str) -> None:
    folder, options = (
        tmp_path / "run",
        STOPS | {"train.micro_batches": 2, "train.early_stop_min_delta": 0.4},
    )
    done = run([*AXONN, "train", "--grid", grid, "--out", str(folder), *small(**options)])
    assert done.status == 0, done.output
    assert "stopped early" in done.output
    assert len(read_metrics(folder).steps) < STOPS["train.steps"]
