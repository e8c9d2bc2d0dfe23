"""Links in the folder of a run, which anybody may have put there, are never followed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

from axonn_ext.checkpoint import Saver, load
from axonn_ext.checkpoint.files import find_problems, write_text
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.spec.files.files import open_new
from axonn_ext.terminal.rows import RowsFile
from axonn_ext.train.metrics import METRICS_FILE, MetricsFile

MODEL = nn.Linear(2, 2)


def test_pruning_does_not_reach_through_a_link(tmp_path) -> None:
    saver = Saver(tmp_path / "run", keep_last=1, background=False)
    saver.save(1, model=MODEL)
    archive = tmp_path / "archive"
    shutil.move(saver.folder.path(1), archive)
    saver.folder.path(1).symlink_to(archive)
    (tmp_path / "run" / ".step-00000009.partial").symlink_to(archive)
    for step in (2, 3):
        saver.save(step, model=MODEL)
    assert not list(find_problems(archive, read_manifest(archive)))
    assert saver.folder.steps() == [1, 3]
    assert not list((tmp_path / "run").glob(".*")), "of what is half written, the link goes"
    load(archive, model=MODEL)


def test_a_step_that_is_saved_again_replaces_the_link_alone(tmp_path) -> None:
    saver = Saver(tmp_path / "run", background=False)
    saver.save(1, model=MODEL)
    archive = tmp_path / "archive"
    shutil.move(saver.folder.path(1), archive)
    saver.folder.path(1).symlink_to(archive)
    (tmp_path / "run" / ".step-00000001.partial").symlink_to(archive)
    before = (archive / "manifest.json").read_text()
    saver.save(1, model=MODEL, extra={"again": True})
    assert load(saver.folder.path(1), model=MODEL) == {"again": True}
    assert (archive / "manifest.json").read_text() == before
    assert not saver.folder.path(1).is_symlink()
    assert not list((tmp_path / "run").glob(".*"))


def write_metrics(path: Path) -> None:
    MetricsFile(path.parent).close()


WRITERS = {
    ".latest.partial": lambda path: write_text(path.parent / "latest", "mine"),
    f".{METRICS_FILE}.partial": write_metrics,
    ".rows.json.part": lambda path: RowsFile("--json", path.parent / "rows.json").write({}),
}


@pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS)
def test_what_is_half_written_is_not_written_through_a_link(tmp_path, name, write) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / name).symlink_to(tmp_path / "theirs")
    write(tmp_path / name)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not list(tmp_path.glob(".*"))


def test_a_new_file_never_is_one_that_comes_meanwhile(tmp_path, monkeypatch) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "file").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: None)
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "file")
    assert (tmp_path / "theirs").read_text() == "theirs"
