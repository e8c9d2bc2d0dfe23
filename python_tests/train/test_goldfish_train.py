"""Goldfish loss in the trainer: the same on grids as in plain torch.nn; and its divisor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import RunMetrics, read_metrics
from commands import AXONN, run, small
from goldfish_cases import hash_of
from trained_here import train_here

pytestmark = pytest.mark.long

# Documents are files of Python's sources. With short windows, the rule covers most of a sequence.
GOLDFISH = {"goldfish.k": 2, "goldfish.h": 2, "train.micro_batches": 4, "train.eval_batches": 8}
PLAIN = {"model.implementation": "plain", "model.num_layers": 4}


def numbers(run_metrics: RunMetrics) -> list[float]:
    """The losses, norms and evaluation losses."""
    steps = run_metrics.steps
    evaluated = [m.eval_loss for m in run_metrics.evaluations]
    return [m.loss for m in steps] + [m.grad_norm for m in steps] + evaluated


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunMetrics:
    """A run in plain torch.nn, in one process."""
    return train_here(tmp_path_factory.mktemp("plain") / "run", **GOLDFISH, **PLAIN)


def test_the_mean_is_over_the_labels_that_are_left(plain: RunMetrics, tmp_path: Path) -> None:
    whole = train_here(tmp_path / "whole", **GOLDFISH | PLAIN | {"goldfish.k": 0, "train.steps": 1})
    # About half of the targets that have a window, 31 of 32; inexact, as text has repetitions.
    assert all(0.3 < m.dropped < 0.65 for m in plain.steps)
    assert [m.dropped for m in whole.steps] == [0.0]
    assert plain.steps[0].loss != whole.steps[0].loss
    # The weights are still the same, and evaluation uses all labels.
    assert plain.evaluations[0].eval_loss == whole.evaluations[0].eval_loss


def test_micro_batches_change_no_loss(plain: RunMetrics, tmp_path: Path) -> None:
    """They have different numbers of labels, so a mean of their means would be wrong."""
    other = {"train.micro_batches": 1, "train.eval_batches": 2, "model.num_layers": 4}
    got = train_here(tmp_path / "run", **GOLDFISH | other)
    torch.testing.assert_close(numbers(got), numbers(plain), rtol=1e-5, atol=0)
    assert [m.dropped for m in got.steps] == [m.dropped for m in plain.steps]


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("z=2", {}),
        *(
            pytest.param(grid, options, marks=pytest.mark.slow)
            for grid, options in (
                ("x=2,y=2", {}),
                (
                    "z=2,data=2",
                    {"overlap.mode": "on", "train.micro_batches": 2, "train.eval_batches": 4},
                ),
                ("pipe=2,z=2", {}),
                ("y=2,pipe=2", {"pipeline.schedule": "1f1b"}),
            )
        ),
    ],
)
def test_a_grid_learns_what_plain_learns(
    plain: RunMetrics, tmp_path: Path, grid: str, options: dict[str, object]
) -> None:
    arguments = small(**GOLDFISH | options | {"model.num_layers": 4})
    done = run([*AXONN, "train", "--grid", grid, "--out", str(tmp_path / "run"), *arguments])
    assert done.status == 0, done.output
    assert "one target in 2 is dropped, by 2 tokens before it" in " ".join(done.output.split())
    got = read_metrics(tmp_path / "run")
    torch.testing.assert_close(numbers(got), numbers(plain), rtol=1e-5, atol=0)
    assert [m.dropped for m in got.steps] == [m.dropped for m in plain.steps]


def test_examples_for_fine_tuning(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    lines = [{"prompt": f"{n} times {n} is ", "completion": f"{n * n}, I think"} for n in range(80)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    got = train_here(
        tmp_path / "run", **GOLDFISH, data__text=text, data__order="examples", data__max_bytes=0,
        data__held_out=0.2, model__sequence_length=64,
    )  # fmt: skip
    assert all(0.3 < m.dropped < 0.7 for m in got.steps)
    assert got.steps[0].loss == pytest.approx(math.log(256), rel=0.05)


def test_a_batch_of_which_every_label_is_dropped_trains_nothing(tmp_path: Path) -> None:
    byte = next(byte for byte in range(256) if hash_of([byte]) < 2**63)
    text = tmp_path / "a.txt"
    text.write_bytes(bytes([byte]) * 4000)
    got = train_here(
        tmp_path / "run", **GOLDFISH | {"goldfish.h": 1}, data__text=text, data__max_bytes=0
    )
    assert {(m.loss, m.grad_norm, m.dropped) for m in got.steps} == {(0.0, 0.0, 1.0)}


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("goldfish.k", "1", "goldfish.k: expected 0 or a whole number >= 2, got 1"),
        ("goldfish.k", "-4", "goldfish.k: expected 0 or a whole number >= 2, got -4"),
        ("goldfish.k", "4.5", "goldfish.k: expected 0 or a whole number >= 2, got"),
        ("goldfish.h", "0", "goldfish.h: expected a whole number >= 1, got 0"),
        ("goldfish.window", "after", "goldfish.window: expected one of before, target, got"),
        ("goldfish.h", "33", "goldfish.h: expected at most 32 (model.sequence_length), got 33"),
    ],
)
def test_bad_options_are_named(key: str, text: str, message: str) -> None:
    given = {"goldfish.k": "4", "model.sequence_length": "32", "data.max_bytes": "9999", key: text}
    with pytest.raises(UserError) as caught:
        overrides = tuple(Override(name, value) for name, value in given.items())
        prepare(load_config(None, overrides=overrides), world_size=1)
    assert message in str(caught.value)


def test_a_bad_option_ends_the_command_with_2() -> None:
    done = run([*AXONN, "train", "--goldfish.k", "1"])
    assert done.status == 2 and "goldfish.k: expected 0 or a whole number >= 2" in done.output
