"""Runs that resume from a checkpoint: in the same folder, in another, on another grid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from axonn_ext.checkpoint.folder import CheckpointFolder
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small, torchrun
from trained_here import train_here

pytestmark = pytest.mark.long

# The learning rate is constant after its warm-up; otherwise it would depend on train.steps.
SAVES = {
    "checkpoint__interval": 2, "parallel__algorithm": "sequential", "optim__final_lr_fraction": 1,
}  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    return {step.step: step.loss for step in read_metrics(folder).steps}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_here(folder, **SAVES)
    return folder


def test_another_folder_and_changed_keys(tmp_path, whole, capsys) -> None:
    first = whole / "checkpoints" / "step-00000004"
    folder = tmp_path / "other"
    train_here(folder, checkpoint__resume=first, optim__lr=5e-3, train__steps=8)
    out = capsys.readouterr().out
    assert f"resumed  step 4 of a run on x=1,y=1,z=1,data=1,pipe=1, from {first}" in out
    assert "optim.lr was 0.003 in the run that is continued, now 0.005" in out
    assert "train.steps was 6 in the run that is continued, now 8" in out, "the cosine's end"
    assert list(losses(folder)) == [5, 6, 7, 8]
    assert not (folder / "checkpoints").exists()
    assert CheckpointFolder(whole / "checkpoints").steps() == [4, 6], "the old run is as it was"


def test_another_length_of_sequences_says_what_is_read(tmp_path, capsys) -> None:
    train_here(tmp_path / "run", **SAVES, model__family="llama", train__steps=2)
    changed = {"model__sequence_length": 16, "train__steps": 3, "checkpoint__resume": "auto"}
    train_here(tmp_path / "run", **SAVES, **changed, model__family="llama")
    assert "now 16: the text is cut anew, so that some of it is read" in capsys.readouterr().out


def test_auto_begins_at_nothing_and_ends_where_all_is_done(tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    files: list[dict[Path, bytes]] = []
    for lr in (3e-3, 2e-3):
        train_here(folder, **SAVES, train__steps=2, checkpoint__resume="auto", optim__lr=lr)
        files.append({path: path.read_bytes() for path in folder.glob("*.*")})
    with pytest.raises(UserError, match="another model"):
        train_here(folder, **SAVES, model__num_layers=1, checkpoint__resume="auto")
    files.append({path: path.read_bytes() for path in folder.glob("*.*")})
    assert files[0] == files[1] == files[2], "config.toml, metrics.jsonl and loss.png stay"
    assert "nothing is left to do: train.steps is 2" in capsys.readouterr().out
    assert list(losses(folder)) == [1, 2]


def test_what_cannot_be_resumed(tmp_path, whole) -> None:
    for resume, options, message in (
        (tmp_path / "none", {}, "none: expected a checkpoint, .* got no folder"),
        (tmp_path, {}, "got a folder without any checkpoint"),
        (
            whole,
            {"model__hidden_size": 64},
            r"resume: hidden_size is 32 in the checkpoint, 64 here: .*another model: .*weight has "
            r"shape .*, in the model [^@]*$",
        ),
        (whole, {"model__num_layers": 1}, r"the model does not have model\.blocks\.1\."),
    ):
        with pytest.raises(UserError, match=message):
            train_here(tmp_path / "run", checkpoint__resume=resume, **options)
        assert not (tmp_path / "run").exists()


def test_auto_never_begins_anew_where_something_would_be_lost(tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    train_here(folder, **SAVES)
    for step in (4, 6):
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="expected a checkpoint, or a folder of checkpoints"):
        train_here(folder, **SAVES, checkpoint__resume="auto")
    assert (folder / "metrics.jsonl").read_text() == before
    assert CheckpointFolder(folder / "checkpoints").steps() == [4, 6]
    assert "no weights were saved" not in capsys.readouterr().out
    train_here(tmp_path / "other")
    assert "no weights were saved: checkpoint.interval is 0\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="got a run without any checkpoint"):
        train_here(tmp_path / "other", **SAVES, checkpoint__resume="auto")


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_is_full_stops_no_training(tmp_path, capsys, monkeypatch, background) -> None:
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target.name == "step-00000002":
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    folder = tmp_path / "run"
    train_here(folder, **SAVES, checkpoint__background=background)
    out = capsys.readouterr().out
    assert "no checkpoint was written: [Errno 28] No space left on device; training goes on" in out
    assert CheckpointFolder(folder / "checkpoints").steps() == [4, 6]
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow  # test_pipeline_train.py has a similar test that is not slow
def test_the_command_goes_on_on_another_grid(tmp_path, whole) -> None:
    folder = tmp_path / "run"
    options = small(**SAVES, train__steps=4)
    begun = run([*AXONN, "train", "--grid", "2x1x1", "--out", str(folder), *options])
    assert begun.status == 0, begun.output
    options = small(**SAVES)
    command = ["train", "--grid", "1x1x2", "--out", str(folder), "--resume", "auto", *options]
    gone_on = run([*torchrun(2), *command])
    assert gone_on.status == 0, gone_on.output
    assert "resumed  step 4 of a run on x=2,y=1,z=1" in gone_on.output
    want, got = losses(whole), losses(folder)
    # Six steps of AdamW amplify the error of fp32 sums in another order; a wrong moment gives 1e-2.
    assert all(math.isclose(got[step], want[step], rel_tol=1e-4) for step in want)


def test_auto_needs_a_folder(tmp_path) -> None:
    refused = run([*AXONN, "train", "--resume", "auto", *small()])
    assert refused.status == 2
    assert "--resume auto goes on with the run in --out FOLDER: name that folder" in refused.output
