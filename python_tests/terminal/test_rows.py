"""Files and tables that get rows one by one."""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
from pathlib import Path

import pytest

from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.terminal.rows import Column, RowsFile, RowsTable, is_replaceable


def test_a_file_is_whole_after_each_row(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text("of an earlier run")
    path.chmod(0o640)
    with path.open() as old, RowsFile("--json", path) as file:
        assert path.read_text() == "of an earlier run", "nothing is known yet"
        for count in (3, 1):
            file.write({"rows": ["a row"] * count})
            assert json.loads(path.read_text()) == {"rows": ["a row"] * count}
        assert old.read() == "of an earlier run", "it was replaced, not written over"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_a_reader_never_finds_half_a_file(tmp_path: Path):
    """A thread writes the file while another one reads it."""
    path, ended, read = tmp_path / "rows.json", threading.Event(), set[int]()
    file = RowsFile("--json", path)
    file.write({"rows": []})

    def read_on() -> None:
        while not ended.is_set():
            read.add(len(json.loads(path.read_text())["rows"]))

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        for count in range(1, 60):
            file.write({"rows": ["x" * 2000] * count})
    finally:
        ended.set()
        reader.join()
    assert read <= set(range(60)) and reader.is_alive() is False


def test_what_fails_leaves_the_last_rows(tmp_path: Path):
    path = tmp_path / "rows.json"
    with pytest.raises(ZeroDivisionError), RowsFile("--json", path) as file:
        file.write({"rows": [1]})
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"rows": [float("nan")]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    (tmp_path / ".rows.json.part").mkdir()  # makes writing fail
    with pytest.raises(TrainingError, match=f"--json: cannot write {path}: Is a directory"):
        file.write({"rows": [2]})
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_a_pipe_gets_the_last_rows(tmp_path: Path):
    path, got = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    with RowsFile("--json", path) as file:
        file.write({"rows": [1]})
        file.write({"rows": [1, 2]})
    reader.join(timeout=60)
    assert [json.loads(text) for text in got] == [{"rows": [1, 2]}]


def test_a_link_stays_one(tmp_path: Path):
    path, target = tmp_path / "link", tmp_path / "target"
    path.symlink_to(target)
    with RowsFile("--json", path) as file:
        file.write({"rows": [1]})
        assert not target.exists()
    assert path.is_symlink() and json.loads(target.read_text()) == {"rows": [1]}
    assert not is_replaceable(path) and is_replaceable(target)
    assert not is_replaceable(Path("/dev/stdout")) and not is_replaceable(tmp_path)


def test_without_a_file_nothing_is_written(tmp_path: Path):
    with RowsFile("--json", None) as file:
        file.write({"rows": [1]})
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_printed_row_by_row():
    out = io.StringIO()
    console = Console()
    console.file = out
    table = RowsTable(console, [Column("name", 6), Column("us", 4, is_number=True), Column("why")])
    assert out.getvalue() == "name      us  why\n"
    table.add(["gather", "1.5", ""])
    assert out.getvalue().endswith("\ngather   1.5\n")
    table.add(["sum", "12.25", "as wide as it is"])
    assert out.getvalue().endswith("\nsum     12.25  as wide as it is\n")
    with pytest.raises(ValueError, match="zip"):
        table.add(["one cell"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_users_file_in_a_sticky_folder_is_not_replaced():
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "rows.json"
        path.touch(mode=0o666)
        for mode, replaceable in ((0o777, True), (0o1777, False)):
            folder.chmod(mode)
            assert is_replaceable(path)  # root may replace it
            os.seteuid(65534)
            try:
                assert is_replaceable(path) is replaceable
                assert is_replaceable(folder / "new.json")
            finally:
                os.seteuid(0)
