"""Two jobs with the same folder: the second is refused unless the first has ended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from axonn_ext.cli import main
from axonn_ext.terminal.errors import UserError
from axonn_ext.train import claim
from axonn_ext.train.claim import CLAIM, claimed
from commands import small, wait_until
from limits import HANG_SECONDS
from trained_here import train_here

HOLDS = """
import sys
import threading
from pathlib import Path
from axonn_ext.train.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.exit(sys.stdin.read() or 0)
"""


@pytest.fixture
def holder(tmp_path):
    """Another job that has claimed the folder of a run."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=HANG_SECONDS)


def change(folder: Path, **values: object) -> None:
    path = folder / CLAIM
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_second_job_is_refused_and_changes_nothing(holder, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").write_text("theirs")
    before = sorted(path.name for path in folder.iterdir())
    said = rf"pid {holder.pid} on {os.uname().nodename} \(since "
    match = rf"--out {folder} is in use by {said}.*\): wait for that job to finish"
    with pytest.raises(UserError, match=match):
        train_here(folder, checkpoint__interval=2, checkpoint__resume="auto", train__steps=1,
                   train__eval_interval=0)  # fmt: skip
    options = ["--out", str(folder), "--overwrite", *small()]
    assert main(["train", "--grid", "x=2", *options]) == 2
    assert main(["memorize", "--out", str(folder), "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert error.count(said.replace("\\", "")) == 2
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "metrics.jsonl").read_text() == "theirs"


@pytest.mark.parametrize("way", ["ends", "fails", "is killed"])
def test_the_folder_of_a_job_that_has_ended_is_free(holder, tmp_path, way) -> None:
    folder = tmp_path / "run"
    if way == "is killed":
        holder.kill()
        holder.wait(timeout=HANG_SECONDS)
        assert (folder / CLAIM).exists()
    else:
        holder.communicate("a mistake" if way == "fails" else "", timeout=HANG_SECONDS)
        assert holder.returncode == (1 if way == "fails" else 0)
        assert not folder.exists(), "nothing was written"
    with claimed(folder):
        assert json.loads((folder / CLAIM).read_text())["pid"] == os.getpid()
    assert not (folder / CLAIM).exists()


def test_a_pid_that_another_process_has_now(holder, tmp_path) -> None:
    change(tmp_path / "run", started="1")
    with claimed(tmp_path / "run"):
        pass


def test_a_job_of_another_host_is_alive_while_it_touches_its_claim(
    holder, tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "run"
    change(folder, host="node\x1b7", place="another boot")
    monkeypatch.setattr(claim, "SILENT_SECONDS", HANG_SECONDS)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.01):
            os.utime(folder / CLAIM)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"in use by pid \d+ on node\\x1b7 \(since "):
            with claimed(folder):
                pass
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("text", [None, "{"])
def test_a_claim_that_nobody_touches_is_taken_over(holder, tmp_path, monkeypatch, text) -> None:
    folder = tmp_path / "run"
    if text is None:
        change(folder, place="another boot")
    else:
        (folder / CLAIM).write_text(text)
    monkeypatch.setattr(claim, "SILENT_SECONDS", 0.1)
    with claimed(folder):
        assert json.loads((folder / CLAIM).read_text())["pid"] == os.getpid()


def test_a_job_touches_its_claim_and_removes_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(claim, "ALIVE_SECONDS", 0.01)
    folder = tmp_path / "run"
    with claimed(folder):
        os.utime(folder / CLAIM, (0, 0))
        wait_until(lambda: (folder / CLAIM).stat().st_mtime > 0, "the job to touch its claim")
        change(folder, pid=1)
    assert (folder / CLAIM).exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_folder_that_was_there_stays(tmp_path, monkeypatch, links: bool) -> None:
    def refused(*paths: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    with claimed(tmp_path):
        with pytest.raises(UserError, match="is in use by pid"), claimed(tmp_path):
            pass
    assert tmp_path.exists() and not (tmp_path / CLAIM).exists()


def test_a_run_that_fails_leaves_no_claim(tmp_path) -> None:
    with pytest.raises(UserError):
        train_here(tmp_path / "run", data__text=tmp_path / "missing")
    assert not (tmp_path / "run").exists()


MEETS = """
import os, sys, time
from pathlib import Path
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.claim import claimed
folder, taken = Path(sys.argv[1]), 0
while taken < 20:
    try:
        with claimed(folder):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
            taken += 1
    except UserError:
        time.sleep(0.001)
"""


def test_of_jobs_that_begin_together_one_holds_the_folder(tmp_path) -> None:
    command = [sys.executable, "-c", MEETS, str(tmp_path / "run")]
    jobs = [subprocess.Popen(command) for _ in range(4)]
    assert [job.wait(timeout=HANG_SECONDS) for job in jobs] == [0] * 4
